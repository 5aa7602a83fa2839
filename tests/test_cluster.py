from __future__ import annotations

import pytest

from hex_llm.cluster import located
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError

TPU = {"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_WORKER_ID": "2"}
LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({}, TPU, (None, 0)),  # one host was asked for
        ({"num_hosts": 4}, {}, (None, 0)),
        ({"num_hosts": 4}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (None, 0)),
        ({"num_hosts": 4}, TPU, ("t-0:8476", 2)),
        ({"num_hosts": 4}, LWS, ("lws-0.lws.default:8476", 3)),
        ({"num_hosts": 4, "coordinator_address": "h:1", "host_index": 1}, TPU, ("h:1", 1)),
        ({"num_hosts": 4, "coordinator_address": "h"}, {}, ("h:8476", 0)),
    ],
)
def test_flags_come_before_the_environment(flags, environ, expected):
    config = located(EngineConfig(**flags), environ)
    assert (config.coordinator_address, config.host_index) == expected


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"num_hosts": 2}, TPU, "--num_hosts=2, but the environment says: host 2 of 4"),
        ({"num_hosts": 4}, {**LWS, "LWS_WORKER_INDEX": "x"}, "host x of 4"),
        (
            {"num_hosts": 2, "coordinator_address": "h:1", "host_index": 2},
            {},
            "--host_index=2: there are 2 hosts",
        ),
        (
            {"num_hosts": 2, "coordinator_address": "h:1", "data_parallel_size": 3},
            {},
            "--data_parallel_size=3: 3 replicas cannot be divided by --num_hosts=2",
        ),
        (
            {"num_hosts": 2, "coordinator_address": "h:1", "data_parallel_size": 2},
            {},
            "replicas on other hosts need --cluster_key",
        ),
        (
            {"num_hosts": 2, "coordinator_address": "h:1", "disagg_topo": "2,1"},
            {},
            "--disagg_topo=2,1: 3 groups cannot be divided by --num_hosts=2",
        ),
        (
            {"num_hosts": 2, "coordinator_address": "h:1", "disagg_topo": "1,1"},
            {},
            "groups on other hosts need --cluster_key",
        ),
    ],
)
def test_what_does_not_fit_is_told(flags, environ, message):
    with pytest.raises(ConfigError, match=message):
        located(EngineConfig(**flags), environ)
