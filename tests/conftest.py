"""Virtual devices for every test, and compiled programs shared by all: must be set before jax starts.

Compiled programs are one run's: the first process makes a folder for them, which its workers inherit, and
removes it. A program that an earlier run left would not be compiled as the test that needs it expects.
"""

import atexit
import functools
import gc
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="hex_llm-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"] + "/torch")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Clients ask this machine, by plain HTTP; each would read the certificates of all authorities, for 50 ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
# On a busy machine making an example may take long, which is nobody's fault.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands set it for their process, which here is that of other tests too."""
    level = logging.getLogger("hex_llm").level
    yield
    logging.getLogger("hex_llm").setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    """Before there are workers, which begin together: each would compile the kernels of CPUs for itself."""
    if config.getoption("numprocesses", None):
        from hex_llm.kernels.cpu import panel_width

        panel_width()


def pytest_collection_finish() -> None:
    """What was imported stays: to look through it again and again takes a third of the server tests' time."""
    gc.collect()
    gc.freeze()
