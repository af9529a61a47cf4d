"""Runs inside the cage as its first process: forks once for each command that world/sandbox.py
orders.

Nobody imports this file. Its text is given to a Python in the cage, with three arguments: the
number of the socket to the sandbox, "1" if there is a cage, "1" if there is a network. No command
has to wait for a cage or for the start of Python: cages stand ready, and the server in each forks
(Cursor's environments fork snapshots of memory). The server is the first process of its process
namespace and serves one command at a time: it waits for the command, kills whatever is left, and
tells how it ended. The fork has mounts and all else of its own. Where the command is a plain Python
script, the fork is this very interpreter, in the state in which it started.

An order is the length of a text (4 bytes) with the command's output as a file descriptor, then the
text, a marshalled dictionary:

    words, environment, stdin  the command and its input
    root, uid                  the folder it runs in, the user it runs as
    limits, processes, disk    resource limits; bytes of its own /tmp

The answer is the command's exit code in one line. One byte from the sandbox, sent before that, asks
to end the command.

The loop that serves orders stands at the end of the file; a fork that is to run a script leaves it
and goes on below it.

`fresh` has to be the first thing here: a script must find no more modules than a new Python has.
"""

import sys

fresh = set(sys.modules)
import ctypes, fcntl, gc, marshal, os, resource, select, signal, socket, struct

line = socket.socket(fileno=os.dup(int(sys.argv[1])))
os.close(int(sys.argv[1]))  # a number that select may not know
caged, online = sys.argv[2] == "1", sys.argv[3] == "1"
libc = ctypes.CDLL(None, use_errno=True)

# What the kernel calls by these numbers: namespaces (unshare), flags of mounts, options of prctl.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 30
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
DUMPABLE, SECCOMP, DROP, SUBREAPER, NO_NEW_PRIVS = 4, 22, 24, 36, 38

# The user and the machine that a command finds itself on, by number and by name.
USER = 1000
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:%d:%d:agent:/tmp:/bin/sh\n" % (USER, USER),
    "group": "root:x:0:\nagent:x:%d:\n" % USER,
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


# ---------------------------------------------------------------- the kernel
def call(name, *arguments):
    """Calls a function of the C library; OSError where it fails."""
    encoded = [os.fsencode(word) if isinstance(word, str) else word for word in arguments]
    if getattr(libc, name)(*encoded):
        number = ctypes.get_errno()
        raise OSError(number, name + ": " + os.strerror(number))


def tell(place, text):
    """Writes into a file of /proc."""
    file = os.open(place, os.O_WRONLY)
    os.write(file, text)
    os.close(file)


def instruction(code, value, then=0, otherwise=0):
    """One instruction of a seccomp filter; `then` and `otherwise` are how many to jump over."""
    return struct.pack("HBBI", code, then, otherwise, value)


def forbidden():
    """(length, program) of a seccomp filter; None on a machine whose numbers we do not know.

    It refuses ptrace (two that trace each other survive SIGKILL), keys (a login's are within
    reach), io_uring, prlimit of another process, sockets to the hypervisor."""
    # Numbers of this machine: the architecture; the system calls prlimit64, socket, ptrace,
    # add_key, request_key, keyctl.
    numbers = {
        "x86_64": (0xC000003E, 302, 41, 101, 248, 249, 250),
        "aarch64": (0xC00000B7, 261, 198, 117, 217, 218, 219),
    }
    if os.uname().machine not in numbers or sys.maxsize < 1 << 32:
        return None
    machine, limits, sockets, *others = numbers[os.uname().machine]

    # The instructions of the filter. It can load the number of the call (at byte 0), the
    # architecture (4) and the first argument (16).
    load, equal, greater = 0x20, 0x15, 0x35  # load a word; jump if it is equal, if it is not below
    load_number, load_machine, load_argument = (instruction(load, at) for at in (0, 4, 16))
    allow, refuse = instruction(6, 0x7FFF0000), instruction(6, 0x50001)  # EPERM

    # Only calls of this architecture, and none of x32, whose numbers begin at 0x40000000. None of
    # the other calls, nor of io_uring.
    lines = [load_machine, instruction(equal, machine, 1), refuse]
    lines += [load_number, instruction(greater, 0x40000000, 0, 1), refuse]
    for number in (*others, 425, 426, 427):  # io_uring
        lines += [instruction(equal, number, 0, 1), refuse]

    # prlimit only of process 0, which is the caller itself.
    lines += [instruction(equal, limits, 0, 4)]
    lines += [load_argument, instruction(equal, 0, 1), refuse, allow]

    # No socket of family 40, the hypervisor's.
    lines += [instruction(equal, sockets, 0, 3)]
    lines += [load_argument, instruction(equal, 40, 0, 1), refuse, allow]
    return len(lines), ctypes.create_string_buffer(b"".join(lines))


# ---------------------------------------------------------------- the walls around one command
def enclose(order):
    """Gives this fork mounts and a network of its own: the command's folder at /work, an empty
    /tmp, a loopback on which the last command has left nothing."""
    call("unshare", NEWNS | NEWUTS | NEWIPC | (0 if online else NEWNET))
    if not online:
        with socket.socket() as any:  # the loopback up: SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
            fcntl.ioctl(any, 0x8914, struct.pack("16sh22x", b"lo", 0x41))

    # An empty /tmp and /dev/shm, of limited size.
    kept = [(place, os.open(place, os.O_PATH)) for place in mounted if place.startswith("/tmp/")]
    for place in ("/tmp", "/dev/shm"):
        size = "mode=1777,size=%d" % order["disk"]
        call("mount", "tmpfs", place, "tmpfs", NOSUID | NODEV, size)

    # What was mounted in the old /tmp, such as a Python that is installed there, is mounted again
    # in the new one.
    for place, fd in kept:
        is_folder = os.path.isdir("/proc/self/fd/%d" % fd)
        os.makedirs(place if is_folder else os.path.dirname(place), exist_ok=True)
        if not os.path.exists(place):
            os.close(os.open(place, os.O_CREAT))
        call("mount", "/proc/self/fd/%d" % fd, place, None, BIND, None)
        os.close(fd)

    # The command's folder at /work; the rest of the host is covered by an empty mount, and a
    # command has no right to unmount it.
    call("mount", "/host" + order["root"], "/work", None, BIND, None)
    call("mount", "tmpfs", "/host", "tmpfs", RDONLY, "mode=555,size=4k")

    # A /proc in which a command sees nothing of the server.
    call("mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    if not order["uid"]:  # it is the user that owns this process namespace
        kernel, flags = "/proc/sys/kernel", REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC
        call("mount", kernel, kernel, None, BIND, None)
        call("mount", None, kernel, None, flags, None)
        own_user_namespace()


def own_user_namespace():
    """Enters a user namespace that owns nothing and counts its own processes, in which this process
    is USER. A command cannot make another namespace in it: there it could mount as much memory as
    it likes."""
    maps = [("uid_map", os.getuid()), ("gid_map", os.getgid())]
    call("unshare", NEWUSER)
    tell("/proc/self/setgroups", b"deny")
    for name, number in maps:
        tell("/proc/self/" + name, b"%d %d 1" % (USER, number))
    tell("/proc/sys/user/max_user_namespaces", b"0")


def drop_bounding_set():
    """Takes care that no program that is started from here on can gain a capability."""
    for capability in range(64):  # until there is none of this number
        if libc.prctl(DROP, capability, 0, 0, 0):
            break


def renounce(order):
    """Gives up all rights: the user, the capabilities, the system calls of the filter."""
    # A user without power, who may have a namespace of his own.
    if order["uid"]:
        os.setgroups([])
        os.setresgid(*[order["uid"]] * 3)
        os.setresuid(*[order["uid"]] * 3)
        call("prctl", DUMPABLE, 1, 0, 0, 0)
        try:
            own_user_namespace()
        except OSError:  # the kernel has none
            pass

    # No capability, now or later, and no system call that the filter refuses.
    drop_bounding_set()  # a new user namespace has them all again
    call("capset", struct.pack("II", 0x20080522, 0), bytes(24))
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    if refusals:
        program = struct.pack("HP", refusals[0], ctypes.addressof(refusals[1]))
        call("prctl", SECCOMP, 2, program, 0, 0)
    call("prctl", DUMPABLE, 1, 0, 0, 0)  # its own /proc is its own again


# ---------------------------------------------------------------- one command, in the fork
def find_script(words):
    """(the C function that runs a program as Python itself does, its arguments, sys.argv, first
    entries of sys.path) of a command that is this Python, started as this one was, with a program;
    None for any other command."""
    rest = words[3:]
    if words[:3] != [sys.executable, "-S", "-B"] or not rest:
        return None

    # The program is a text or a file. It imports from the working directory or from the folder of
    # its file.
    if rest[0] == "-c" and len(rest) > 1:
        run, text = ctypes.pythonapi.PyRun_SimpleStringFlags, os.fsencode(rest[1])
        return run, (text, None), ["-c", *rest[2:]], [""]
    if rest[0].endswith(".py") and os.path.isfile(rest[0]):
        # Closed to this user it is None, and the program of its own says so.
        file = fopen(os.fsencode(rest[0]), b"rb")
        run, name = ctypes.pythonapi.PyRun_SimpleFileExFlags, os.path.abspath(rest[0])
        arguments = ctypes.c_void_p(file), os.fsencode(name), 1, None
        return file and (run, arguments, rest, [os.path.dirname(os.path.realpath(name))])
    return None


def set_limits(limits):
    """Sets these limits [(name, most)], whatever was in force."""
    for name, most in limits:
        kind = getattr(resource, "RLIMIT_" + name)
        try:
            resource.setrlimit(kind, (most, most))
        except ValueError:
            # Only root raises a hard limit of the shell, and macOS knows no limit on memory.
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))


def open_input(data):
    """File descriptor of a nameless file that holds a command's input."""
    name = "/tmp/.input-%d" % os.getpid()
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def begin_command(order, output_fd):
    """Turns this fork into the command of an order. It returns only for a script that is to run in
    this interpreter: what find_script says of it."""
    # A session of its own, the usual signals, and the walls around it.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    try:
        if caged:
            enclose(order)
        input_fd = open_input(order["stdin"])
    except BaseException as error:
        line.send(str(error).encode() + b"; ")
        os._exit(127)

    # Its input and output are its own; all other files, and the line, are closed.
    os.dup2(input_fd, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    line.detach()
    os.closerange(3, 1024)

    # Give up all rights, then start the program. What fails here is told on the command's output.
    try:
        set_limits(order["limits"])
        if caged:
            renounce(order)
            # after its own namespace, which would count it against all that the user runs
            set_limits([("NPROC", order["processes"])])
        os.chdir("/work" if caged else order["root"])
        os.environ.clear()
        os.environ.update(order["environment"])
        found = find_script(order["words"])
        if not found:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.execvp(order["words"][0], order["words"])
        return found
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", 0) or error
        text = "%s: %s" % (order["words"][0][:80], why)
        os.write(2, text.encode("utf-8", "replace"))
        os._exit(127)


def watch(last):
    """Waits until the process `last` has ended or the sandbox asks for its end; kills whatever it
    has left -> its exit code."""
    # Wait for the end of the command, or for a byte on the line. Processes whose parents have ended
    # belong to the server: it has to collect them, too.
    code = None
    while code is None and line not in select.select([line, ended], [], [])[0]:
        os.read(ended, 4096)
        pid = 1
        while pid:  # strangers, too, whose parents have ended
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == last and not os.WIFSTOPPED(status):
                code = os.waitstatus_to_exitcode(status)
    if code is None:
        libc.kill(last, signal.SIGKILL)  # it may have no session of its own yet
        code = -signal.SIGKILL

    # Kill what it has left, until nothing is there that could still write: its group, and every
    # process that has become the server's. A signal's exit code is 128 and its number.
    libc.killpg(last, signal.SIGKILL)
    try:
        while True:
            for pid in left_processes():
                libc.kill(pid, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                select.select([], [], [], 0.001)
    except ChildProcessError:
        return code if code >= 0 else 128 - code


def left_processes():
    """The numbers to kill: in a cage -1, which is every process but the server; elsewhere the
    server's children, to which the children of those that end are added."""
    if caged:
        return [-1]
    try:
        with open("/proc/self/task/%d/children" % os.getpid()) as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # macOS
        return []


# ---------------------------------------------------------------- getting ready
# The signals and the umask of a new login, whatever the shell of this run had (nohup ignores some).
# Python itself ignores SIGPIPE and SIGXFSZ, and the server SIGINT.
unchanged = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
for number in signal.valid_signals() - unchanged:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.umask(0o22)

# A pipe that has something to read when a process has ended.
ended, wakeup_fd = os.pipe()
os.set_blocking(wakeup_fd, False)
signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)

if caged:
    mounted = []
    with open("/proc/self/mountinfo") as file:
        for text in file:
            place = os.fsencode(text.split()[4]).decode("unicode_escape")
            mounted.append(os.fsdecode(place.encode("latin-1")))
    # where the next process can be given its number
    call("mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, None)

    # Names of the user and of this machine. With a network some of these are the machine's own.
    for name, text in ETC.items():
        if not os.path.exists("/etc/" + name):
            with open("/etc/" + name, "w") as file:
                file.write(text)
    call("mount", None, "/etc", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV, None)
    drop_bounding_set()
    refusals = forbidden()
elif hasattr(libc, "prctl"):
    # A process of a command whose parent has ended becomes a child of this one.
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
fopen = libc.fopen
fopen.restype = ctypes.c_void_p
exec(compile(b"", "", "exec"))  # the first time of anything is slow: do it before the forks
gc.freeze()
line.send(b"!")

# ---------------------------------------------------------------- one order after the other
while True:
    # Receive an order: its length and the command's output, then its text.
    head, places, *_ = socket.recv_fds(line, 4, 1, socket.MSG_WAITALL)
    if len(head) < 4:
        sys.exit()
    text, read, more = bytearray(int.from_bytes(head, "big")), 0, 1
    while more and read < len(text):
        more = line.recv_into(memoryview(text)[read:])
        read += more
    if not more:  # whoever ordered was killed in the middle of it
        sys.exit()

    # Every command has the same process number, that after the one written here.
    try:
        if caged:
            tell("/proc/sys/kernel/ns_last_pid", b"1")
    except OSError:  # a kernel that only counts
        pass
    last = os.fork()
    if not last:
        run, arguments, sys.argv, sys.path[:1] = begin_command(marshal.loads(text), *places)
        break

    # The server: erase the order, wait for the command, and answer.
    text[:] = bytes(len(text))  # no later command finds it in its memory
    os.close(places[0])
    line.send(b"%d\n" % watch(last))
    if not line.recv(1):  # nobody there who has heard
        sys.exit()

# ---------------------------------------------------------------- the script, in the fork
# A new __main__, and only those modules that a new Python has. The server's own stay alive in
# `kept`.
kept = [sys.modules.pop(other) for other in {*sys.modules} - fresh | {"__main__"}]
sys.modules["__main__"] = type(sys)("__main__")

# Run it as Python does, which shows an error and leaves at SystemExit. After an error this program
# ends by one of its own, which nobody sees, and Python ends as it would have ended.
if run(*arguments):
    sys.excepthook = lambda *_: None
    raise RuntimeError
