"""Programs that use as much as they can. They run in sandboxes only."""

from tests.sandbox.corpus.attack import make_attacks

ATTACKS = make_attacks(
    {
        "fork_bomb": """
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
            """,
        "thread_bomb": """
            import threading
            while True:
                threading.Thread(target=time.sleep, args=(30,)).start()
            """,
        "process_bomb": """
            import subprocess
            while True:
                subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(30)'])
            """,
        "memory_bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
        "memory_bomb_of_children": """
            for _ in range(8):
                if os.fork() == 0:
                    x = bytearray(90 << 20)
                    time.sleep(30)
            time.sleep(30)
            """,
        "shared_memory_bomb": """
            for _ in range(8):
                if os.fork() == 0:
                    m = mmap.mmap(-1, 90 << 20)
                    for i in range(0, 90 << 20, 4096):
                        m[i] = 1
                    time.sleep(30)
            time.sleep(30)
            """,
        "disk_bomb": """
            i = 0
            while True:
                with open(f'file{i}', 'wb') as f:
                    f.write(bytes(1 << 20))
                i += 1
            """,
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
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            while True:
                pass
            """,
        "recursion": "sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
        "big_number": "print(len(str(7 ** 7 ** 9)))",
        "slow_pattern": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        "crash": "ctypes.string_at(0)",
        "orphans": """
            while True:
                if os.fork() == 0:
                    os.fork()
                    os._exit(0)
            """,
    },
    not_outside="a bomb",
)
