"""Tests of Ray labels: parsing, labels set by the launch, and the NVLink domain."""

import pytest

from megarl.errors import ConfigError
from megarl.launch.node_labels import find_node_labels, parse_labels, parse_nvlink_domain
from megarl.launch.node_world import NodeWorld

FABRIC = """
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : 8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11
        Health
            Bandwidth                     : N/A
    Processes                             : None
"""


def world(**fields):
    return NodeWorld(rank=3, size=4, host="n4", head_hosts=("n1",), head_port=None, job="j", **fields)


def test_labels_are_parsed_as_ray_does():
    from ray._private.label_utils import parse_node_labels_string

    words = ["gpu=h100,rack=7", "my.org/kind=big-one", "megarl.node-rank=3"]
    assert parse_labels(words) == parse_node_labels_string(",".join(words))
    assert parse_labels(words)["my.org/kind"] == "big-one"
    assert parse_labels([]) == {}


@pytest.mark.parametrize("word", ["gpu", "gpu=", "=h100", "a=b=c", "gpu=h 100", "-a=b", "a=b,", "k=" + "v" * 64])
def test_invalid_labels_are_rejected(word):
    with pytest.raises(ConfigError, match="--labels needs KEY=VALUE"):
        parse_labels([word])


def test_labels_set_by_the_launch():
    assert find_node_labels(world(), None) == {"megarl.node-rank": "3"}
    assert find_node_labels(world(het_group=1), "a.1") == {
        "megarl.node-rank": "3",
        "megarl.het-group": "1",
        "megarl.nvlink-domain": "a.1",
    }


def test_nvlink_domain_of_a_gpu_in_a_fabric():
    domain = parse_nvlink_domain(FABRIC)
    assert domain == "8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11.32766"
    assert parse_labels([f"d={domain}"]) == {"d": domain}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU 1\n    Product Name : NVIDIA H100\n",
        FABRIC.replace("8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11", "00000000-0000-0000-0000-000000000000"),
        FABRIC.replace("8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11", "N/A").replace("32766", "N/A"),
    ],
)
def test_no_nvlink_domain_without_a_fabric(text):
    assert parse_nvlink_domain(text) is None
