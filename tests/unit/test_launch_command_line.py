"""The fast reading of a command line: SGLang's flags pass, ours are taken out, mistakes are one line."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from glm_sglang import command_line, launch_defaults, own_flags
from glm_sglang.command_line import as_argv, for_sglang, parse
from glm_sglang.errors import UsageError


def test_sglangs_flags_pass_through_unchanged() -> None:
    argv = [
        "--model-path",
        "/m",
        "--tp",
        "8",
        "--attention-backend=dsa",
        "--enable-metrics",
        "--cuda-graph-bs-prefill",
        "1",
        "2",
    ]
    assert parse(argv).argv == argv


def test_flags_are_known_by_field_whatever_their_spelling() -> None:
    given = parse(
        ["--tensor-parallel-size", "8", "--page-size=64", "--enable-metrics", "--disaggregation-m", "prefill"]
    ).given
    assert given == {
        "tp_size": "8",
        "page_size": "64",
        "enable_metrics": True,
        "disaggregation_mode": "prefill",
    }


def test_our_flags_are_taken_out() -> None:
    request = parse(["--glm-print-config", "--model-path", "/m", "--glm-no-defaults"])
    assert request.argv == ["--model-path", "/m"]
    assert request.has(own_flags.PRINT_CONFIG)
    assert request.has(own_flags.NO_DEFAULTS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-sise", "64"], r"^unknown flag --page-sise; did you mean --page-size\?$"),
        (["--glm-print-confg"], r"^unknown flag --glm-print-confg; did you mean --glm-print-config\?$"),
        (["--qqqqqqqq"], r"^unknown flag --qqqqqqqq; .*--help lists them all$"),
        (["--page-size"], r"^argument --page-size: expected one argument$"),
        (["/models/glm"], r"^unexpected argument '/models/glm'; .*--model-path$"),
        (["--disaggregation", "prefill"], r"^ambiguous option: --disaggregation could match "),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)


def test_a_flag_of_another_installed_plugin_is_not_unknown() -> None:
    # smg-grpc-servicer, which sglang depends on, adds --servicer-impl to SGLang's parser.
    argv = ["--servicer-impl", "rust", "--model-path", "/m"]
    assert parse(argv).argv == argv


def write(folder: Path, text: str) -> Path:
    file = folder / "server.yaml"
    file.write_text(text)
    return file


def test_config_counts_as_given_and_the_command_line_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "page-size: 32\ntensor-parallel-size: 4\ndisaggregation_mode: prefill\n")
    request = parse(["--config", str(file), "--page-size", "128"])
    assert request.given == {"page_size": "128", "tp_size": 4, "disaggregation_mode": "prefill"}


SPELLINGS = (("--config", "{}"), ("--config={}",), ("--conf", "{}"), ("--conf={}",))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_config_reach_sglang_too(tmp_path: Path, spelling: tuple[str, ...]) -> None:
    file = write(tmp_path, "page-size: 32\n")
    assert parse([word.format(file) for word in spelling]).argv == ["--config", str(file)]


@pytest.mark.parametrize("path", ["{}/server.yaml", "./server.yaml", "../{}/./server.yaml"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_our_flags_in_config_are_kept_from_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: tuple[str, ...], path: str
) -> None:
    write(tmp_path, "page-size: 32\nglm-no-defaults: true\n")
    monkeypatch.chdir(tmp_path)
    path = path.format(tmp_path if path.startswith("{") else tmp_path.name)
    request = parse(
        ["--glm-cache-wait", "never", *[word.format(path) for word in spelling], "--tp-size", "2"]
    )
    assert request.has(own_flags.NO_DEFAULTS)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    flag, copy, *rest = for_sglang(request, run_folder)
    assert (flag, rest) == ("--config", ["--tp-size", "2"])
    assert Path(copy).parent == run_folder
    assert Path(copy).read_text() == "page-size: 32\n"


def handed_down(tmp_path: Path, text: str) -> dict[str, str]:
    environ: dict[str, str] = {}
    own_flags.hand_down(parse(["--config", str(write(tmp_path, text))]).given, environ)
    return environ


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("glm-prefill-graph: off", {"GLM_SGLANG_PREFILL_GRAPH": "off"}),
        ("glm-prefill-graph: strict", {"GLM_SGLANG_PREFILL_GRAPH": "strict"}),
        ("glm-prefill-graph-buckets: [1024, 2048]", {"GLM_SGLANG_PREFILL_GRAPH_BUCKETS": "1024,2048"}),
        ("glm-prefill-graph-buckets: 1024,2048", {"GLM_SGLANG_PREFILL_GRAPH_BUCKETS": "1024,2048"}),
        ("glm-prefill-graph-buckets: 2048", {"GLM_SGLANG_PREFILL_GRAPH_BUCKETS": "2048"}),
        ("glm-verify-graphs: on", {"GLM_SGLANG_VERIFY_GRAPHS": "1"}),
        ("glm-verify-graphs: off", {"GLM_SGLANG_VERIFY_GRAPHS": "0"}),
        ("glm-cache-url: null", {}),
        ("glm-cache-url:", {}),
        ("glm-verify-graphs:", {}),
    ],
)
def test_values_of_ours_in_a_config_mean_what_they_do_on_the_command_line(
    tmp_path: Path, text: str, environ: dict[str, str]
) -> None:
    assert handed_down(tmp_path, text) == environ


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("glm-prefill-graph: on", r"^--glm-prefill-graph is 'on', allowed: auto, strict, off$"),
        ("glm-moe: off", r"^--glm-moe is 'off', allowed: auto, megamoe, stock$"),
        ("glm-no-defaults: 'false'", r"glm-no-defaults is 'false', allowed: true, false$"),
    ],
)
def test_values_of_ours_in_a_config_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        handed_down(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page-sise: 64\n", "unknown key 'page-sise'; did you mean page-size"),
        ("- 1\n", "expected a mapping of flag to value, found list"),
        ("a: [\n", "while parsing"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(["--config", str(write(tmp_path, text))])
    assert "\n" not in str(caught.value)


def test_a_missing_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        parse(["--config", str(tmp_path / "none.yaml")])


def test_values_become_flags() -> None:
    settings = {
        "page_size": 64,
        "enable_metrics": True,
        "skip_tokenizer_init": False,
        "cp_strategy": None,
        "cuda_graph_bs_prefill": [1, 2],
    }
    assert as_argv(settings) == ["--page-size", "64", "--enable-metrics", "--cuda-graph-bs-prefill", "1", "2"]


def filled(argv: list[str], platform: str = "cuda") -> dict[str, object]:
    return {value.field: value.value for value in launch_defaults.fill(parse(argv), platform)}  # type: ignore[arg-type]


def test_a_prefill_node_is_filled_in() -> None:
    assert filled(["--disaggregation-mode", "prefill"]) == {
        "disaggregation_transfer_backend": "nixl",
        "page_size": 64,
        "enable_metrics": True,
    }


def test_an_explicit_flag_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "disaggregation-transfer-backend: mooncake\nenable-metrics: false\n")
    argv = ["--disaggregation-mode", "prefill", "--page-size", "128", "--config", str(file)]
    assert filled(argv) == {}


def test_context_parallel_prefill_interleaves() -> None:
    argv = ["--disaggregation-mode", "prefill", "--enable-prefill-cp"]
    assert filled(argv)["cp_strategy"] == "interleave"
    assert "cp_strategy" not in filled([*argv, "--cp-strategy", "zigzag"])


@pytest.mark.parametrize(
    "argv",
    [[], ["--disaggregation-mode", "decode"], ["--disaggregation-mode", "prefill", "--glm-no-defaults"]],
)
def test_nothing_is_filled_in_otherwise(argv: list[str]) -> None:
    assert filled(argv) == {}


def test_the_reference_platform_adds_its_own() -> None:
    assert filled([], "reference")["device"] == "cpu"
    assert "device" not in filled(["--device", "cuda"], "reference")


def test_help_shows_our_flags_first_and_every_flag_of_sglang() -> None:
    out = io.StringIO()
    command_line.print_help(out)
    text = out.getvalue()
    first_own, first_upstream = text.index("--glm-print-config"), text.index("--model-path MODEL_PATH")
    assert first_own < first_upstream
    from glm_sglang.upstream.flags import flags

    missing = [flag.option for flag in flags() if flag.option not in text]
    assert missing == []


def test_help_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; from glm_sglang import launch_server; code = launch_server.main(['--help']);"
        "print(code, [m for m in ('torch', 'sglang', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == "0 []"
    assert "--glm-print-config" in done.stdout
