"""Runs inside the cage as its first process: forks once for each command that world/sandbox.py
orders.

Nobody imports this file. Its text is given to a Python in the cage, with three arguments: the
number of the socket to the sandbox, "1" if there is a cage, "1" if there is a network. No command
waits until a cage stands and Python has started: cages stand ready, and the server in each forks
(Cursor's environments fork snapshots of memory). It is the first of its process namespace and
serves one command at a time: it looks on, kills whatever is left, and tells how it ended. Its fork
has mounts and all else of its own; where the command is a plain Python script, the fork is this
very interpreter, in the state in which it started.

An order is the length of a text (4 bytes) with the command's input and output as file descriptors,
then the text, a marshalled dictionary:

    words, environment         the command
    root, uid, names           the folder it runs in, the user it runs as
    limits, disk               resource limits; bytes of its own /tmp

The answer is its exit code in one line. One byte from the sandbox asks for the end before.

`fresh` has to be the first thing here: a script must find no more modules than a new Python has.
"""

import sys

fresh = set(sys.modules)
import atexit, ctypes, fcntl, gc, io, marshal, os, resource, select, signal, socket, struct

line, caged, online = (
    socket.socket(fileno=os.dup(int(sys.argv[1]))),
    sys.argv[2] == "1",
    sys.argv[3] == "1",
)
os.close(int(sys.argv[1]))  # a number that select may not know
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWNET = (1 << bit for bit in (17, 26, 27, 28, 30))
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, NO_NEW_PRIVS, DUMPABLE, DROP, SECCOMP = (
    1,
    2,
    4,
    8,
    32,
    4096,
    38,
    4,
    24,
    22,
)


def call(name, *arguments):
    if getattr(libc, name)(
        *(os.fsencode(word) if isinstance(word, str) else word for word in arguments)
    ):
        raise OSError(ctypes.get_errno(), name + ": " + os.strerror(ctypes.get_errno()))


def tell(place, text):
    file = os.open(place, os.O_WRONLY)
    os.write(file, text)
    os.close(file)


def traffic():  # what went over the network, which holds its ports for a minute, and sockets that
    with (
        open("/proc/self/net/dev") as file,
        open("/proc/self/net/sockstat") as used,
    ):  # still hang in other sockets
        return file.read() + used.readline()


def forbidden():
    # a seccomp filter: no ptrace (two that trace each other survive SIGKILL), no keys (a login's
    # are within reach), no io_uring, no prlimit of another process, no socket to the hypervisor
    numbers = {
        "x86_64": (0xC000003E, 302, 41, 101, 248, 249, 250),
        "aarch64": (0xC00000B7, 261, 198, 117, 217, 218, 219),
    }
    if os.uname().machine not in numbers or sys.maxsize < 1 << 32:
        return None
    line = lambda code, value, then=0, otherwise=0: struct.pack(
        "HBBI", code, then, otherwise, value
    )
    load, equal, allow, refuse = (
        (lambda place: line(0x20, place)),
        0x15,
        line(6, 0x7FFF0000),
        line(6, 0x50001),
    )  # EPERM
    machine, limits, sockets, *others = numbers[os.uname().machine]
    lines = [
        load(4),
        line(equal, machine, 1),
        refuse,
        load(0),
        line(0x35, 0x40000000, 0, 1),
        refuse,
    ]  # of no other machine
    for number in (*others, 425, 426, 427):
        lines += [line(equal, number, 0, 1), refuse]
    lines += [line(equal, limits, 0, 4), load(16), line(equal, 0, 1), refuse, allow]
    lines += [line(equal, sockets, 0, 3), load(16), line(equal, 40, 0, 1), refuse, allow]
    return len(lines), ctypes.create_string_buffer(b"".join(lines))


def another_network():
    call("unshare", NEWNET)
    with socket.socket() as any:  # the loopback up: SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
        fcntl.ioctl(any, 0x8914, struct.pack("16sh22x", b"lo", 0x41))


def enclose(order):
    call("unshare", NEWNS | NEWUTS | NEWIPC)
    kept = [(place, os.open(place, os.O_PATH)) for place in mounted if place.startswith("/tmp/")]
    for place in ("/tmp", "/dev/shm"):
        call("mount", "tmpfs", place, "tmpfs", NOSUID | NODEV, "mode=1777,size=%d" % order["disk"])
    for place, fd in kept:  # a Python that lives there
        os.makedirs(
            place if os.path.isdir("/proc/self/fd/%d" % fd) else os.path.dirname(place),
            exist_ok=True,
        )
        os.close(os.open(place, os.O_CREAT)) if not os.path.exists(place) else None
        call("mount", "/proc/self/fd/%d" % fd, place, None, BIND, None)
        os.close(fd)
    call("mount", "/host" + order["root"], "/work", None, BIND, None)
    call(
        "mount", "tmpfs", "/host", "tmpfs", RDONLY, "mode=555,size=4k"
    )  # whoever has no right to unmount never sees under it
    call(
        "mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2"
    )  # of the server it sees nothing
    if not order["uid"]:  # it is the user that owns this process namespace
        call("mount", "/proc/sys/kernel", "/proc/sys/kernel", None, BIND, None)
        call(
            "mount",
            None,
            "/proc/sys/kernel",
            None,
            REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC,
            None,
        )
        alone(order)


def alone(order):
    # a user namespace that owns nothing and counts its own processes. A command can make none
    # in it, to mount as much memory as it likes
    maps = [b"%d %d 1" % pair for pair in zip(order["names"], (os.getuid(), os.getgid()))]
    call("unshare", NEWUSER)
    tell("/proc/self/setgroups", b"deny"), tell("/proc/self/uid_map", maps[0]), tell(
        "/proc/self/gid_map", maps[1]
    )
    tell("/proc/sys/user/max_user_namespaces", b"0")


def bound():  # no program that is started from here on gains a right
    for capability in range(64):  # until there is none of this number
        if libc.prctl(DROP, capability, 0, 0, 0):
            break


def renounce(order):
    if order["uid"]:
        os.setgroups([]), os.setresgid(*[order["uid"]] * 3), os.setresuid(*[order["uid"]] * 3)
        call("prctl", DUMPABLE, 1, 0, 0, 0)
        try:
            alone(order)
        except OSError:  # the kernel has none
            pass
    bound()  # a new user namespace has them all again
    call("capset", struct.pack("II", 0x20080522, 0), bytes(24))
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    if refusals:
        call(
            "prctl", SECCOMP, 2, struct.pack("HP", refusals[0], ctypes.addressof(refusals[1])), 0, 0
        )
    call("prctl", DUMPABLE, 1, 0, 0, 0)  # its own /proc is its own again


def script(python, *rest):
    flags, rest = [word for word in rest[:3] if word in ("-I", "-S", "-E", "-B")], list(rest)
    del rest[: len(flags)]
    if python == sys.executable and "-S" in flags and rest[:1] == ["-c"] and len(rest) > 1:
        return os.fsencode(rest[1]), "<string>", ["-c", *rest[2:]], [""] * ("-I" not in flags)
    if (
        python == sys.executable
        and "-S" in flags
        and rest
        and rest[0].endswith(".py")
        and os.path.isfile(rest[0])
    ):
        with open(rest[0], "rb") as file:
            return (
                file.read(),
                os.path.abspath(rest[0]),
                rest,
                [os.path.dirname(os.path.realpath(rest[0]))] * ("-I" not in flags),
            )


def command(order, given, wanted):
    signal.set_wakeup_fd(-1), signal.signal(signal.SIGCHLD, signal.SIG_DFL), os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        enclose(order) if caged else None
    except BaseException as error:
        line.send(str(error).encode() + b"; ")
        os._exit(127)
    os.dup2(given, 0), os.dup2(wanted, 1), os.dup2(wanted, 2), line.detach(), os.closerange(3, 1024)
    try:
        renounce(order) if caged else None
        os.chdir("/work" if caged else order["root"])
        os.environ.clear(), os.environ.update(order["environment"])
        for kind, most in order["limits"]:
            most = min(
                [
                    most,
                    *(
                        limit
                        for limit in resource.getrlimit(kind)[1:]
                        if limit != resource.RLIM_INFINITY
                    ),
                ]
            )
            try:
                resource.setrlimit(kind, (most, most))
            except ValueError:  # macOS knows no limit on memory
                if caged:
                    raise
        found = script(*order["words"])
        if not found:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL), signal.signal(
                signal.SIGXFSZ, signal.SIG_DFL
            )
            os.execvp(order["words"][0], order["words"])
        return found
    except (OSError, ValueError) as error:
        os.write(
            2,
            ("%s: %s" % (order["words"][0][:80], getattr(error, "strerror", 0) or error)).encode(
                "utf-8", "replace"
            ),
        )
        os._exit(127)


def watch(last):  # until it has ended, or whoever ordered it wants no more -> exit code
    code = None
    while code is None and line not in select.select([line, ended], [], [])[0]:
        os.read(ended, 4096)
        pid = 1
        while pid:  # strangers, too, whose parents have ended
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            code = (
                os.waitstatus_to_exitcode(status)
                if pid == last and not os.WIFSTOPPED(status)
                else code
            )
    if code is None:
        libc.kill(last, signal.SIGKILL)  # it may have no session of its own yet
        code = -signal.SIGKILL
    libc.killpg(last, signal.SIGKILL)
    if caged:
        libc.kill(-1, signal.SIGKILL)
    try:
        while True:  # until they write nothing any more
            os.waitpid(-1, 0)
    except ChildProcessError:
        return code if code >= 0 else 128 - code


def flush(*files):
    for file in files:
        if file is not None and not file.closed:
            file.flush()


def leave():
    # as Python ends, but for taking all of its own memory apart, which is copied page by page
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    try:
        flush(*streams)
    except BaseException:  # that has its words and its exit code
        return
    for other in set(sys.modules) - fresh | {"__main__"}:
        del sys.modules[other]
    del globals()["main"]
    atexit._clear(), gc.collect()  # what the script made goes, and files are flushed with it
    flush(*(left for left in gc.get_objects() if issubclass(type(left), io.IOBase)), *streams)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL), os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def exit_status(code):
    if isinstance(code, int):
        return code & 255 if -1 << 63 <= code < 1 << 63 else 255
    return int(code is not None)


ended, pen = os.pipe()  # has something to read when a process has ended
os.set_blocking(pen, False)
signal.set_wakeup_fd(pen, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None), signal.signal(signal.SIGINT, signal.SIG_IGN)
if caged:
    with open("/proc/self/mountinfo") as file:
        mounted = [
            os.fsdecode(os.fsencode(text.split()[4]).decode("unicode_escape").encode("latin-1"))
            for text in file
        ]
    call(
        "mount", "proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, None
    )  # where the next process can be given its number
    bound()
    still, refusals = traffic(), forbidden()
exec(compile(b"", "", "exec"))  # the first time of anything is dear
gc.freeze()
line.send(b"!")
while True:
    head, places, *_ = socket.recv_fds(line, 4, 2, socket.MSG_WAITALL)
    if len(head) < 4:
        sys.exit()
    text, read, more = bytearray(int.from_bytes(head, "big")), 0, 1
    while more and read < len(text):
        more = line.recv_into(memoryview(text)[read:])
        read += more
    if not more:  # whoever ordered was killed in the middle of it
        sys.exit()
    try:
        (
            tell("/proc/sys/kernel/ns_last_pid", b"1") if caged else None
        )  # the number before that of the command
    except OSError:  # a kernel that only counts
        pass
    if not (last := os.fork()):
        source, name, sys.argv, sys.path[:1] = command(marshal.loads(text), *places)
        break
    text[:] = bytes(len(text))  # no later command finds it in its memory
    for place in places:
        os.close(place)
    code = watch(last)
    if caged and not online and traffic() != still:
        another_network()
    line.send(b"%d\n" % code)
    if not line.recv(1):  # nobody there who has heard
        sys.exit()
main = sys.modules["__main__"] = type(sys)("__main__")
main.__dict__.update(
    __builtins__=__builtins__, **({} if name == "<string>" else {"__file__": name})
)
kept = [sys.modules.pop(other) for other in set(sys.modules) - fresh]
atexit.register(leave)  # what the script registers is called before
status, interrupted = 0, False
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
