"""Programs that look for files, variables and memory of the host."""

from tests.sandbox.corpus.attack import make_attacks

ATTACKS = make_attacks(
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
                try:
                    print(open(f'/proc/{pid}/root' + T['file']).read())
                    break
                except OSError:
                    pass
            """,
        "read_proc_cwd": "print(open(f\"/proc/{T['host']}/cwd/\" + '../' * 30 + T['file']).read())",
        "read_environment": "print(dict(os.environ))",
        "read_environments_of_all": """
            for pid in filter(str.isdecimal, os.listdir('/proc')):
                try:
                    print(open(f'/proc/{pid}/environ').read())
                except OSError:
                    pass
            """,
        "read_environment_by_c": """
            libc.getenv.restype = ctypes.c_char_p
            print(libc.getenv(b'MEGARL_CANARY'))
            """,
        "read_open_file_of_host": "print(open(f\"/proc/{T['host']}/fd/{T['fd']}\").read())",
        "read_inherited_files": """
            for fd in range(3, 200):
                try:
                    print(os.pread(fd, 1000, 0))
                except OSError:
                    pass
            """,
        "read_shared_memory": "print(open(T['shm']).read())",
        "read_shared_memory_by_name": """
            from multiprocessing import shared_memory
            memory = shared_memory.SharedMemory(name=os.path.basename(T['shm']))
            print(bytes(memory.buf[:100]), flush=True)
            """,
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
            reached('/sys' in folders or '/dev/shm' in folders or '/run' in folders)
            """,
        "list_processes": """
            for pid in filter(str.isdecimal, os.listdir('/proc')):
                try:
                    if T['marker'].encode() in open(f'/proc/{pid}/cmdline', 'rb').read() and int(pid) != os.getpid():
                        reached()
                except OSError:
                    pass
            """,
    }
)
ATTACKS += make_attacks(
    {
        "write_library": "open(os.__file__, 'a'); reached()",
        "write_usr": "open('/usr/lib/megarl-corpus', 'w'); os.remove('/usr/lib/megarl-corpus'); reached()",
        "read_memory_of_host": """
            memory = open(f"/proc/{T['host']}/mem", 'rb', 0)
            memory.seek(T['address'])
            print(memory.read(64))
            """,
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
                    reached()
            """,
        "make_device": """
            os.mknod('device', 0o600 | 0o060000, os.makedev(254, 0))
            os.open('device', os.O_RDONLY)
            reached()
            """,
        "open_kernel_memory": "os.open('/proc/kcore', os.O_RDONLY); reached()",
        "open_sysrq": "os.open('/proc/sysrq-trigger', os.O_WRONLY); reached()",
        "open_core_pattern": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY); reached()",
        "open_by_handle": """
            handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))
            mount = ctypes.c_int()
            if libc.name_to_handle_at(-100, T['file'].encode(), handle, ctypes.byref(mount), 0) == 0:
                fd = libc.open_by_handle_at(os.open(T['folder'], os.O_RDONLY), handle, 0)
                print(os.read(fd, 100))
            """,
    },
    not_outside="needs devices or kernel interfaces that not all machines have",
)
