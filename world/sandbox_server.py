"""Runs inside the cage as its first process: forks once for each command that world/sandbox.py
orders.

Nobody imports this file. Its text is given to a Python in the cage, with three arguments: the
number of the socket to the sandbox, "1" if there is a cage, "1" if there is a network. No command
has to wait for a cage or for the start of Python: cages stand ready, and the server in each forks
(Cursor's environments fork snapshots of memory). The server is the first process of its process
namespace and serves one command at a time: it waits for the command, kills whatever is left, and
tells how it ended. The fork has mounts and all else of its own. Where the command is a plain Python
script, the fork is this very interpreter, in the state in which it started.

An order is the length of a text (4 bytes) with the command's input and output as file descriptors,
then the text, a marshalled dictionary:

    words, environment         the command
    root, uid, names           the folder it runs in, the user it runs as
    limits, disk               resource limits; bytes of its own /tmp

The answer is the command's exit code in one line. One byte from the sandbox, sent before that, asks
to end the command.

The loop that serves orders stands at the end of the file; a fork that is to run a script leaves it
and goes on below it.

`fresh` has to be the first thing here: a script must find no more modules than a new Python has.
"""

import sys

fresh = set(sys.modules)
import atexit, ctypes, fcntl, gc, io, marshal, os, resource, select, signal, socket, struct

line = socket.socket(fileno=os.dup(int(sys.argv[1])))
os.close(int(sys.argv[1]))  # a number that select may not know
caged, online = sys.argv[2] == "1", sys.argv[3] == "1"
libc = ctypes.CDLL(None, use_errno=True)

# What the kernel calls by these numbers: namespaces (unshare), flags of mounts, options of prctl.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 30
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
DUMPABLE, SECCOMP, DROP, NO_NEW_PRIVS = 4, 22, 24, 38


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


def network_counters():
    """The kernel's counts of what went over the network, and of sockets in use. If they have
    changed, a command may have left something: ports that are held for a minute, or sockets that
    hang in other sockets."""
    with open("/proc/self/net/dev") as file, open("/proc/self/net/sockstat") as used:
        return file.read() + used.readline()


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
def another_network():
    """Moves this process into a new network, where the last command has left nothing."""
    call("unshare", NEWNET)
    with socket.socket() as any:  # the loopback up: SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
        fcntl.ioctl(any, 0x8914, struct.pack("16sh22x", b"lo", 0x41))


def enclose(order):
    """Gives this fork mounts of its own: the command's folder at /work, and an empty /tmp."""
    # An empty /tmp and /dev/shm, of limited size.
    call("unshare", NEWNS | NEWUTS | NEWIPC)
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
        own_user_namespace(order)


def own_user_namespace(order):
    """Enters a user namespace that owns nothing and counts its own processes. A command cannot make
    another namespace in it: there it could mount as much memory as it likes."""
    uid_map, gid_map = (
        b"%d %d 1" % pair for pair in zip(order["names"], (os.getuid(), os.getgid()))
    )
    call("unshare", NEWUSER)
    tell("/proc/self/setgroups", b"deny")
    tell("/proc/self/uid_map", uid_map)
    tell("/proc/self/gid_map", gid_map)
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
            own_user_namespace(order)
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
def script(python, *rest):
    """(source, file name, sys.argv, first entries of sys.path) of a command that is this Python
    with -S and a program; None for any other command."""
    # The flags come first. This interpreter was started with -S, so it can stand in only for a
    # Python that is.
    flags, rest = [word for word in rest[:3] if word in ("-I", "-S", "-E", "-B")], list(rest)
    del rest[: len(flags)]
    if python != sys.executable or "-S" not in flags:
        return None

    # The program is a text or a file. Without -I it imports from the working directory or from the
    # folder of its file.
    isolated = "-I" in flags
    if rest[:1] == ["-c"] and len(rest) > 1:
        return os.fsencode(rest[1]), "<string>", ["-c", *rest[2:]], [] if isolated else [""]
    if rest and rest[0].endswith(".py") and os.path.isfile(rest[0]):
        with open(rest[0], "rb") as file:
            source = file.read()
        folder = os.path.dirname(os.path.realpath(rest[0]))
        return source, os.path.abspath(rest[0]), rest, [] if isolated else [folder]
    return None


def set_limits(limits):
    """Sets these limits [(kind, most)]; a lower one that is in force already stays."""
    for kind, most in limits:
        for limit in resource.getrlimit(kind)[1:]:
            if limit != resource.RLIM_INFINITY:
                most = min(most, limit)
        try:
            resource.setrlimit(kind, (most, most))
        except ValueError:  # macOS knows no limit on memory
            if caged:
                raise


def command(order, input_fd, output_fd):
    """Turns this fork into the command of an order. It returns only for a script that is to run in
    this interpreter: what script() says of it."""
    # A session of its own, the usual signals, and the walls around it.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if caged:
            enclose(order)
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
        if caged:
            renounce(order)
        os.chdir("/work" if caged else order["root"])
        os.environ.clear()
        os.environ.update(order["environment"])
        set_limits(order["limits"])
        found = script(*order["words"])
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

    # Kill what it has left: its group, and in a cage every other process. Wait until all are gone,
    # so that nothing is written any more. A signal's exit code is 128 and its number.
    libc.killpg(last, signal.SIGKILL)
    if caged:
        libc.kill(-1, signal.SIGKILL)
    try:
        while True:  # until they write nothing any more
            os.waitpid(-1, 0)
    except ChildProcessError:
        return code if code >= 0 else 128 - code


# ---------------------------------------------------------------- the end of a script
def flush(*files):
    """Flushes those of these files that are open; None is no file."""
    for file in files:
        if file is not None and not file.closed:
            file.flush()


def leave():
    """Ends the script as Python ends, without freeing all of its own memory: each page of it would
    be copied from the server first."""
    # Python itself reports a stream that cannot be flushed, with its own words and exit code.
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    try:
        flush(*streams)
    except BaseException:
        return

    # Drop what the script made, so that its objects are finalized. Files that are still there are
    # flushed.
    for other in set(sys.modules) - fresh | {"__main__"}:
        del sys.modules[other]
    del globals()["main"]
    atexit._clear()
    gc.collect()
    flush(*(left for left in gc.get_objects() if issubclass(type(left), io.IOBase)), *streams)

    # A script that was interrupted ends by the signal, as Python does; any other by its status.
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def exit_status(code):
    """The status of a process that ends by SystemExit(code)."""
    if isinstance(code, int):
        return code & 255 if -1 << 63 <= code < 1 << 63 else 255
    return int(code is not None)


# ---------------------------------------------------------------- getting ready
ended, wakeup_fd = os.pipe()  # has something to read when a process has ended
os.set_blocking(wakeup_fd, False)
signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.signal(signal.SIGINT, signal.SIG_IGN)
if caged:
    mounted = []
    with open("/proc/self/mountinfo") as file:
        for text in file:
            place = os.fsencode(text.split()[4]).decode("unicode_escape")
            mounted.append(os.fsdecode(place.encode("latin-1")))
    # where the next process can be given its number
    call("mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, None)
    drop_bounding_set()
    still, refusals = network_counters(), forbidden()
exec(compile(b"", "", "exec"))  # the first time of anything is slow: do it before the forks
gc.freeze()
line.send(b"!")

# ---------------------------------------------------------------- one order after the other
while True:
    # Receive an order: its length and two file descriptors, then its text.
    head, places, *_ = socket.recv_fds(line, 4, 2, socket.MSG_WAITALL)
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
        source, name, sys.argv, sys.path[:1] = command(marshal.loads(text), *places)
        break

    # The server: erase the order, wait for the command, and answer.
    text[:] = bytes(len(text))  # no later command finds it in its memory
    for place in places:
        os.close(place)
    code = watch(last)
    if caged and not online and network_counters() != still:
        another_network()
    line.send(b"%d\n" % code)
    if not line.recv(1):  # nobody there who has heard
        sys.exit()

# ---------------------------------------------------------------- the script, in the fork
# A new __main__, and only those modules that a new Python has. The server's own stay alive in
# `kept`.
main = sys.modules["__main__"] = type(sys)("__main__")
main.__dict__["__builtins__"] = __builtins__
if name != "<string>":
    main.__dict__["__file__"] = name
kept = [sys.modules.pop(other) for other in set(sys.modules) - fresh]
atexit.register(leave)  # what the script registers is called before
status, interrupted = 0, False

# Run it. An exception is shown without this file's own line in the traceback.
try:
    exec(compile(source, name, "exec"), main.__dict__)
except SystemExit as error:
    status = exit_status(error.code)
    raise
except BaseException as error:
    error.__traceback__ = error.__traceback__.tb_next
    status = 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted = type(error) is KeyboardInterrupt
    except SystemExit as leaving:
        status = exit_status(leaving.code)
        raise
