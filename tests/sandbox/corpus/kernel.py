"""Programs that use interfaces of the kernel which have led out of sandboxes."""

from tests.sandbox.corpus.attack import make_attacks

ATTACKS = make_attacks(
    {
        "new_user_namespace": "reached(libc.unshare(0x10000000) == 0)",
        "clone_user_namespace": """
            pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
            if pid == 0:
                os._exit(0)
            reached(pid > 0)
            """,
        "user_fault": "reached(libc.syscall(323, 1) >= 0)",
        "memory_file": "os.memfd_create('x'); reached()",
        "personality": "reached(libc.personality(0x40000) != -1)",
        "seccomp_listener": """
            libc.prctl(38, 1, 0, 0, 0)
            program = (ctypes.c_uint64 * 1)(0x7FFF000000000006)
            struct_ = struct.pack('HxxxxxxQ', 1, ctypes.addressof(program))
            reached(libc.syscall(317, 1, 8, struct_) >= 0)
            """,
        "calls_of_32_bits": """
            code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])  # mov eax, 20; int 0x80 (getpid); ret
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(code)
            function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
            reached(function() > 0)
            """,
    }
)
ATTACKS += make_attacks(
    {
        "new_network_namespace": "reached(libc.unshare(0x40000000) == 0)",
        "chroot": "os.mkdir('r'); os.chroot('r'); os.chroot('../../../../..'); reached()",
        "kernel_log": "reached(libc.klogctl(10, None, 0) > 0)",
        "performance_events": """
            attributes = struct.pack('IIQ', 1, 112, 0) + bytes(96)
            reached(libc.syscall(298, attributes, 0, -1, -1, 0) >= 0)
            """,
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
            print(open(T['file']).read())
            """,
        "mount_namespace": "reached(libc.unshare(0x20000) == 0)",
        "clone3_user_namespace": """
            pid = libc.syscall(435, struct.pack('QQQQQ', 0x10000000, 0, 0, 0, 17) + bytes(48), 88)
            if pid == 0:
                os._exit(0)
            reached(pid > 0)
            """,
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
