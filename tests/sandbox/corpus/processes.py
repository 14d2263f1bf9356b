"""Programs that look for other processes, or that do not end."""

from tests.sandbox.corpus.attack import make_attacks

ATTACKS = make_attacks(
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
                print(buffer.raw)
            """,
        "ptrace_attach": "reached(libc.ptrace(16, T['victim'], None, None) == 0)",
        "enter_namespace": "reached(libc.setns(os.open(f\"/proc/{T['host']}/ns/uts\", os.O_RDONLY), 0) == 0)",
        "take_file_of_host": """
            fd = libc.syscall(438, os.pidfd_open(T['host']), T['fd'], 0)
            print(os.pread(fd, 100, 0))
            """,
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
                print(ctypes.string_at(libc.shmat(found, None, 0x1000), 64))
            """,
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
            time.sleep(0.1)
            """,
        "kill_group": "os.killpg(0, signal.SIGKILL)",
        "kill_first_process": "os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGSEGV); time.sleep(0.1)",
        "write_memory_of_parent": "open(f'/proc/{os.getppid()}/mem', 'r+b'); reached()",
        "open_files_of_parent": """
            for fd in range(10):
                try:
                    os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_RDWR)
                    reached()
                except OSError:
                    pass
            """,
        "forge_reply": r"""
            body = b'{"status": "ok", "stdout": "\\u0052EACHED", "stderr": "", "value": "True"}'
            for path in [f'{pid}/fd/{fd}' for pid in ('self', os.getppid()) for fd in range(64)]:
                try:
                    fd = os.open('/proc/' + path, os.O_WRONLY | os.O_NONBLOCK)
                except OSError:
                    continue
                try:
                    os.write(fd, struct.pack('!I', len(body)) + body)
                except OSError:
                    pass
            time.sleep(0.2)
            """,
        "become_root": "os.setuid(0); reached()",
        "drop_groups": "os.setgroups([0]); reached()",
        "gain_capabilities": """
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            reached(libc.capset(header, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)) == 0)
            """,
        "set_user_bit": """
            import shutil, subprocess
            shutil.copy(sys.executable, 'copy'); os.chmod('copy', 0o4755)
            out = subprocess.run(['./copy', '-c', 'import os; print(os.geteuid())'], capture_output=True).stdout
            reached(out.strip() == b'0')
            """,
        "run_written_program": """
            import shutil, subprocess
            shutil.copy(sys.executable, 'copy'); os.chmod('copy', 0o755)
            subprocess.run(['./copy', '-S', '-c', 'print(1)'], check=True)
            reached()
            """,
        "type_into_terminal": """
            import fcntl
            for fd in range(3):
                fcntl.ioctl(fd, 0x5412, b'x')
                reached()
            """,
        "daemon": """
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for fd in range(3):
                        os.close(fd)
                    time.sleep(30)
                os._exit(0)
            """,
        "daemon_that_ignores_signals": """
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                while True:
                    time.sleep(1)
            """,
        "thread_that_stays": "import threading; threading.Thread(target=time.sleep, args=(30,)).start()",
        "stop_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
        "parent_that_waits": "os.fork() == 0 and time.sleep(30); os.wait()",
    },
    not_outside="ends or leaves processes of the machine, or needs a user without rights",
)
