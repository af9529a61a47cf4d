"""Which files of a folder were opened or changed, as the kernel reports it: inotify through ctypes.

The watch is on inodes and from outside, so a command in a cage cannot see it. By which name the
command calls a file or a program does not matter. Folders are watched; an event names the file in
its folder. Linux only: elsewhere `Watcher.make` answers None.
"""

import ctypes
import os
import select
import struct
import threading

# Numbers of <sys/inotify.h>
MODIFY, CLOSE_WRITE, MOVED_FROM, MOVED_TO = 0x2, 0x8, 0x40, 0x80
CREATE, DELETE, OPEN, OVERFLOW, IS_DIRECTORY = 0x100, 0x200, 0x20, 0x4000, 0x40000000
ONLY_DIRECTORIES, DO_NOT_FOLLOW = 0x01000000, 0x02000000
CHANGES = MODIFY | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE
HEADER = struct.Struct("iIII")


class Watcher:
    """One queue of events for any number of folders. Threads may share it: each asks only for the
    folders that it has added itself.

    A queue is slow to close (the kernel waits for all readers of its lists, some 15 ms), and a user
    may have only 128 of them. So a process keeps one queue and adds and removes folders.

    events: {number of a folder: [(name, mask)]} not yet taken; lost: how often the queue was full.
    """

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify is not to be had")
        self.owner, self.lock, self.events, self.lost = os.getpid(), threading.Lock(), {}, 0

    @staticmethod
    def make():
        """A new one, or None where the system has no inotify."""
        try:
            return Watcher()
        except (OSError, AttributeError, TypeError):
            return None

    def add(self, folder, mask):
        """Watches a folder -> its number, which is negative if that cannot be."""
        mask |= ONLY_DIRECTORIES | DO_NOT_FOLLOW
        with self.lock:
            number = self.libc.inotify_add_watch(self.fd, os.fsencode(folder), mask)
            if number >= 0:
                self.events[number] = []
        return number

    def drain(self):
        """Takes the events that the kernel holds, and sorts them by folder."""
        with self.lock:
            # Read until the kernel has no more.
            while True:
                try:
                    data = os.read(self.fd, 1 << 16)
                except BlockingIOError:
                    return

                # Take apart the events: each is a header and a name of variable length. Events of a
                # folder that was removed meanwhile are dropped.
                at = 0
                while at < len(data):
                    number, mask, _, length = HEADER.unpack_from(data, at)
                    name = data[at + HEADER.size : at + HEADER.size + length].rstrip(b"\0")
                    at += HEADER.size + length
                    if mask & OVERFLOW:
                        self.lost += 1
                    elif number in self.events:
                        self.events[number].append((os.fsdecode(name), mask))

    def take(self, number):
        """[(name, mask)] of a folder's events since the last call, oldest first."""
        self.drain()
        with self.lock:
            found, self.events[number] = self.events[number], []
        return found

    def remove(self, numbers):
        """Ends the watch of these folders."""
        with self.lock:
            for number in numbers:
                self.libc.inotify_rm_watch(self.fd, number)
                self.events.pop(number, None)

    def wait(self, other):
        """Waits for an event, or for something to read in another file -> whether the other file
        has something. other: its number.
        """
        poll = select.poll()  # select cannot wait for file numbers over 1023
        poll.register(self.fd, select.POLLIN)
        poll.register(other, select.POLLIN)
        return any(number == other for number, _ in poll.poll())

    def close(self):
        os.close(self.fd)


# the watcher of this process, and the process it belongs to
SHARED = {}
SHARED_LOCK = threading.Lock()


def shared_watcher():
    """The one Watcher of this process (a fork gets another), or None where there is no inotify."""
    with SHARED_LOCK:
        if SHARED.get("owner") != os.getpid():
            SHARED.update(owner=os.getpid(), watcher=Watcher.make())
        return SHARED["watcher"]


class Folders:
    """Several folders below one root, watched until `close`."""

    def __init__(self, watcher, root, masks):
        """masks: {folder relative to the root: mask}; a folder that is not there is left out."""
        self.watcher, self.numbers = watcher, {}
        for folder, mask in masks.items():
            number = watcher.add(os.path.join(root, folder), mask)
            if number >= 0:
                self.numbers[number] = folder
        self.lost = watcher.lost

    def take(self):
        """[(path relative to the root, mask)], oldest first within each folder."""
        found = []
        for number, folder in self.numbers.items():
            for name, mask in self.watcher.take(number):
                found.append((os.path.normpath(os.path.join(folder, name)), mask))
        return found

    def complete(self):
        """Whether no event was lost since the watch began."""
        return self.watcher.lost == self.lost

    def close(self):
        self.watcher.remove(self.numbers)
