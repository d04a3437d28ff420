"""The fork's metrics over several processes, as prometheus_client joins them for /metrics."""

import os
import subprocess
import sys
from pathlib import Path

_PROCESS = """
import sys
from glm_sglang import metrics
metrics.record(hooks={hooks}, untested={untested}, platform="reference")
assert ("prometheus_client" in sys.modules) is {imported}
{then}
"""
_COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def python(program: str, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_process_with_the_most_counts(tmp_path: Path) -> None:
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    python(_PROCESS.format(hooks=8, untested=0, imported=True, then=""), **folder)
    python(_PROCESS.format(hooks=9, untested=2, imported=True, then=""), **folder)
    lines = python(_COLLECT, **folder).splitlines()
    assert "glm_sglang:hooks_installed 9.0" in lines
    assert "glm_sglang:untested_upstream_symbols 2.0" in lines
    assert 'glm_sglang:build_info{platform="reference",version="0.1.0"} 1.0' in lines


def test_the_launcher_waits_until_the_folder_is_set(tmp_path: Path) -> None:
    """prometheus_client chooses its mode when it is imported: too early would lose SGLang's metrics too."""
    publish = f"import os; os.environ['PROMETHEUS_MULTIPROC_DIR'] = {str(tmp_path)!r}; metrics.publish()"
    python(_PROCESS.format(hooks=7, untested=0, imported=False, then=publish))
    lines = python(_COLLECT, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).splitlines()
    assert "glm_sglang:hooks_installed 7.0" in lines
