"""A harness for runs of random models: asks twice, and returns a reward."""

import json
import os
import sys
import urllib.request


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, "model": "m"}).encode(),
        {"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


messages = json.load(sys.stdin)["messages"]
reply = ask(messages)
last = ask([*messages, reply, {"role": "user", "content": "Once more."}])
with open(os.environ["RESULT_FILE"], "w") as file:
    json.dump({"reward": float("1" in (reply["content"] + last["content"]))}, file)
