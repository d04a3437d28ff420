"""The endpoint files that come with the project say what can be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ab import endpoints

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "endpoints"
VALUES = {"model": "/m", "vllm": "/", "prefill": "0", "decode": "1", "flags": "--tp 1", "stock": ""}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_file_gives_endpoints_with_ports_and_flushable_processes(file: Path) -> None:
    specs, absent = endpoints.load(file, VALUES)
    assert len(specs) + len(absent) >= 2
    for spec in specs:
        ports = endpoints.Ports()
        for name, command in spec.processes.items():
            argv = ports.argv(name, command)
            assert argv[argv.index("--port") + 1] == str(ports.of(name))
            assert not [word for word in argv if "{" in word]
        assert set(spec.flush or ()) <= set(spec.processes)
        # The asked process is the last one; a pair's is its router.
        assert list(spec.processes)[-1] in ("router", "server")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_who_writes_the_usage_counts_cached_tokens(file: Path) -> None:
    """Behind a router that is decode: without the flag SGLang's usage has no cached tokens, whatever prefill knows."""
    specs, _ = endpoints.load(file, VALUES)
    counted = []
    for spec in specs:
        server = "decode" if "router" in spec.processes else list(spec.processes)[-1]
        words = spec.processes[server].split()
        if "vllm" in words[0]:  # its name for it
            assert "--enable-prompt-tokens-details" in words
            continue
        counted.append(server)
        assert "--enable-cache-report" in words, (spec.name, server)
    assert counted


def test_both_sides_of_make_bench_differ_in_launcher_and_cache_alone() -> None:
    (stock, ours), _ = endpoints.load(FOLDER / "cpu.yaml", VALUES)
    words = [set(spec.processes["server"].split()) for spec in (stock, ours)]
    assert words[0] - words[1] == {"sglang.launch_server"}
    cache = {"--glm-cache-url", "embedded://", "--glm-cache-pool-gb", "1"}
    assert words[1] - words[0] == {"glm_sglang.launch_server", *cache}
