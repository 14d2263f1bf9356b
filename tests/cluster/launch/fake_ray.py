"""Fast stand-in for `megarl.cluster.launch.ray_start`: prints what Ray prints and starts a process as Ray does.

FAKE_RAY selects a failure on one rank: `refuse0` fails to start, `slow0` hangs, `die0` exits shortly after its start.
"""

import json
import os
import subprocess
import sys
import time

line = sys.stdin.readline()
if not line:
    sys.exit(0)
request = json.loads(line)
os.environ.update(request["environment"])
mode = os.environ.get("FAKE_RAY", "")
rank = request["arguments"][request["arguments"].index("--labels") + 1].partition("megarl.node-rank=")[2][0]
if mode == f"refuse{rank}":
    sys.stdout.write("no room for the object store\n")
    sys.exit(3)
if mode == f"slow{rank}":
    time.sleep(6000)
# a worker that outlives this process unless somebody terminates it
subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep infinity"], start_new_session=True)
sys.stdout.write("Ray runtime started.\n")
sys.stdout.flush()
time.sleep(0.5 if mode == f"die{rank}" else 6000)
sys.stdout.write("the raylet is dead\n")
sys.exit(1)
