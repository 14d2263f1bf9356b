"""Programs that look for the network and for sockets of the host."""

from tests.sandbox.corpus.attack import make_attacks

ATTACKS = make_attacks(
    {
        "tcp_v4": "print(socket.create_connection(('127.0.0.1', T['tcp'])).recv(200))",
        "tcp_v6": "print(socket.create_connection(('::1', T['tcp6'])).recv(200))",
        "tcp_host_address": """
            s = socket.socket()
            s.connect(('0.0.0.0', T['tcp']))
            print(s.recv(200))
            """,
        "http": """
            import urllib.request
            print(urllib.request.urlopen(f"http://127.0.0.1:{T['http']}/").read())
            """,
        "udp": """
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.sendto(b'x', ('127.0.0.1', T['udp']))
            print(s.recv(200))
            """,
        "unix": "s = socket.socket(socket.AF_UNIX); s.connect(T['unix']); print(s.recv(200))",
        "unix_abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + T['abstract']); print(s.recv(200))",
        "unix_by_proc": """
            s = socket.socket(socket.AF_UNIX)
            s.connect(f"/proc/{T['host']}/root" + T['unix'])
            print(s.recv(200))
            """,
        "netlink": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); reached()",
        "listen": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); reached()",
        "socket_by_c": """
            fd = libc.socket(2, 1, 0)
            address = struct.pack('=HHI8x', 2, socket.htons(T['tcp']), socket.htonl(0x7F000001))
            buffer = ctypes.create_string_buffer(200)
            if libc.connect(fd, address, 16) == 0 and libc.recv(fd, buffer, 200, 0) > 0:
                print(buffer.value)
            """,
        "bash_tcp": """
            import subprocess
            print(subprocess.run(['bash', '-c', f"head -c 40 < /dev/tcp/127.0.0.1/{T['tcp']}"],
                                 capture_output=True).stdout)
            """,
        "read_by_asyncio": """
            import asyncio
            async def main():
                reader, _ = await asyncio.open_connection('127.0.0.1', T['tcp'])
                print(await reader.read(200))
            asyncio.run(main())
            """,
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
            reached()
            """,
    },
    not_outside="needs a kernel module, or changes a network interface",
)
