"""The command line of the simulator, called in this process."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import zoo
from transformers import CONFIG_MAPPING

from torch_uma.simulate import Report, replay
from torch_uma.simulate.__main__ import main

SMALL = [
    *("--config", "gpt_oss"),
    *("--set", "num_hidden_layers=2", "--set", "num_local_experts=4", "--set", "hidden_size=256"),
    *("--memory", "24MiB"),
    "--quiet",
]
MADE = ["--made", "12,200,20,0.5", "--at-once"]


def reports(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "reports.json"
    assert main([*SMALL, *arguments, "--json", str(path)]) == 0
    assert "requests completed" in capsys.readouterr().out
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert not said.out and "Traceback" not in said.err
    return said.err


def test_made_traffic_is_run_and_reported(capsys, tmp_path: Path) -> None:
    (report,) = reports(capsys, tmp_path, *MADE).values()
    assert report["num_completed"] == 12 and report["running"][0][1] > 1


def test_a_trace_is_run_and_cut(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"prompt_tokens": 40, "output_tokens": 3, "at_s": 5 * n}) for n in range(9)))
    honoured = reports(capsys, tmp_path, "--trace", str(trace))["arena"]
    assert honoured["num_completed"] == 9 and honoured["seconds"] > 40 and honoured["max_running"] == 1
    at_once = reports(capsys, tmp_path, "--trace", str(trace), "--at-once", "--limit", "4")["arena"]
    assert at_once["num_completed"] == 4 and at_once["seconds"] < 1 and at_once["max_running"] == 4
    faster = reports(capsys, tmp_path, "--trace", str(trace), "--rate", "100")["arena"]
    assert faster["num_completed"] == 9 and faster["seconds"] < 1


def test_the_config_can_be_changed_or_read_from_a_file(capsys, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    CONFIG_MAPPING["gpt_oss"](num_hidden_layers=2, num_local_experts=4, hidden_size=256).save_pretrained(folder)
    for source in (folder, folder / "config.json"):
        path = tmp_path / "reports.json"
        arguments = ["--config", str(source), "--memory", "24MiB", "--quiet", *MADE, "--json", str(path)]
        assert main(arguments) == 0
        assert json.loads(path.read_text()) == reports(capsys, tmp_path, *MADE)


def test_a_folder_goes_before_the_model_type_of_its_name(capsys, tmp_path: Path, monkeypatch) -> None:
    CONFIG_MAPPING["llama"](num_hidden_layers=1, hidden_size=64, head_dim=16).save_pretrained(tmp_path / "gpt_oss")
    monkeypatch.chdir(tmp_path)
    assert main(["--config", "gpt_oss", "--memory", "24MiB", "--quiet", *MADE]) == 0
    assert "window_128" not in capsys.readouterr().out


def test_fixed_pools_are_compared(capsys, tmp_path: Path) -> None:
    asked = ["default", "best", '{"window_128": 0.5, "full": 0.5}']
    path = tmp_path / "reports.json"
    splits = [argument for split in asked for argument in ("--split", split)]
    assert main([*SMALL, "--made", "60,3000,40,0.5", "--at-once", *splits, "--json", str(path)]) == 0
    read = json.loads(path.read_text())
    assert [name.split()[0] for name in read] == ["arena", "default", "best", "split"]
    arena, default, best, _ = read.values()
    assert default["new_tokens_per_s"] <= best["new_tokens_per_s"]
    assert arena["time_mean_running"] > default["time_mean_running"]
    said = capsys.readouterr().out
    assert said.count("one arena against") == 3 and "split 0.50/0.50" in said
    assert "fixed pools: called by their shares of window_128/full" in said


def test_what_was_asked_is_said_first(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"prompt_tokens": 30 + n, "output_tokens": 3, "at_s": n}) for n in range(5)))
    assert main([*SMALL, "--trace", str(trace), "--max-running", "7"]) == 0
    requests, model, machine, _, *_ = capsys.readouterr().out.splitlines()
    assert requests == "requests: 5 in 4 s, 1.25 a second; on the mean 32 tokens of a prompt and 3 new ones"
    assert model.startswith("model: gpt_oss, weights of 0.") and model.endswith(" GB in bf16 without the embedding")
    assert machine == "machine: h200, simulated; 0.03 GB for the arena, 7 requests running at most"
    assert main([*SMALL, *MADE]) == 0
    assert "requests: 12 at once; " in capsys.readouterr().out


def test_a_device_of_speeds(capsys, tmp_path: Path) -> None:
    speeds = {"flops_per_s": 790e12, "bytes_per_s": 4.3e12, "host_bytes_per_s": 55e9, "forward_s": 0.3e-3}
    h200 = reports(capsys, tmp_path, *MADE)["arena"]
    assert reports(capsys, tmp_path, *MADE, "--device", json.dumps(speeds))["arena"] == h200
    slower = json.dumps({**speeds, "forward_s": 0.3})
    assert reports(capsys, tmp_path, *MADE, "--device", slower)["arena"]["seconds"] > 10 * h200["seconds"]


def test_nothing_is_heard_of_kernels_that_do_not_run(capsys) -> None:
    arguments = ["--config", "jamba", "--set", "num_hidden_layers=8", "--set", "hidden_size=64", "--memory", "1GiB"]
    assert main([*arguments, *MADE, "--quiet"]) == 0
    assert not capsys.readouterr().err


def test_no_split_is_replayed_twice(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search begins with the default one, and may end with it."""
    asked: list[Any] = []

    def noted(*arguments: Any, split: Any, **options: Any) -> Report:
        asked.append(split and tuple(split.items()))
        return replay(*arguments, split=split, **options)

    monkeypatch.setattr("torch_uma.simulate.__main__.replay", noted)
    assert main([*SMALL, *MADE, "--split", "default", "--split", "best"]) == 0
    assert len(asked) == len(set(asked)) > 5
    assert "best" in capsys.readouterr().out


def test_splits_are_looked_at_before_anything_is_run(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_uma.simulate.__main__.replay", None)
    assert "--split fast" in error(capsys, *SMALL, *MADE, "--split", "fast")
    assert "name sub-pools of the plan" in error(capsys, *SMALL, *MADE, "--split", '{"window": 0.5}')


def test_scheduler_settings_reach_the_scheduler(capsys, tmp_path: Path) -> None:
    few = reports(capsys, tmp_path, *MADE, "--max-running", "2")["arena"]
    assert few["max_running"] == 2
    busy = ["--made", "40,1500,900,0.3", "--at-once", "--headroom-steps", "1"]
    dropped = reports(capsys, tmp_path, *busy)["arena"]
    assert dropped["dropped"] > 0 and dropped["offloaded"] == 0
    busy += ["--set", "hidden_size=2880", "--host-memory", "1GiB"]  # takes longer to compute than to copy
    kept = reports(capsys, tmp_path, *busy)["arena"]
    assert kept["offloaded"] > 0 and kept["host_bytes"] > 0


def test_a_drawing(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.png"
    assert main([*SMALL, *MADE, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    monkeypatch.setattr("torch_uma.simulate.options.find_spec", lambda name: None)
    assert "pip install torch-uma[plots]" in error(capsys, *SMALL, *MADE, "--plot", str(path))
    assert util.find_spec("matplotlib")


def test_progress_is_shown_unless_it_is_not_wanted(capsys) -> None:
    assert main([*SMALL, *MADE]) == 0
    assert not capsys.readouterr().err
    assert main([argument for argument in [*SMALL, *MADE] if argument != "--quiet"]) == 0
    assert "arena: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SMALL, "--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        ([*SMALL, "--made", "12,200,20"], "not four numbers"),
        ([*SMALL, "--made", "inf,200,20,1"], "not four numbers"),
        ([*SMALL, "--made", "12,0,20,1"], "prompts and answers of a token or more"),
        ([*SMALL, *MADE, "--limit", "0"], "--limit is at least 1"),
        ([*SMALL, *MADE[:2], "--rate", "-1"], "positive rate"),
        ([*SMALL, *MADE, "--rate", "5"], "not allowed with argument"),
        ([*SMALL, *MADE, "--seed", "-1"], "the seed of a trace is at least 0"),
        ([*SMALL, "--made", "12.5,200,20,1"], "not four numbers"),
        ([*SMALL, "--made", "1e17,200,20,1"], "Unable to allocate"),
        ([*SMALL, *MADE, "--headroom-steps", "1" + 30 * "0"], "too large"),
        ([*SMALL, *MADE, "--split", "fast"], '--split fast is not "default", "best" or shares'),
        ([*SMALL, *MADE, "--split", '{"full": "all"}'], "shares such as"),
        ([*SMALL, *MADE, "--split", '{"nothing": 0.5}'], "nothing"),
        ([*SMALL, *MADE, "--split", "{}"], "shares such as"),
        ([*SMALL, *MADE, "--split", '{"full": 1}'], "the pool cannot hold one request"),
        ([*SMALL, *MADE, "--set", "num_hidden_layers"], "no NAME=VALUE"),
        ([*SMALL, *MADE, "--set", "=4"], "no NAME=VALUE"),
        ([*SMALL, *MADE, "--set", "num_wheels=4"], "the config of gpt_oss has no num_wheels"),
        ([*SMALL, *MADE, "--set", "to_dict=4"], "the config of gpt_oss has no to_dict"),
        ([*SMALL, *MADE, "--set", "num_key_value_heads=0"], "and --set no model can be made (ZeroDivisionError"),
        ([*SMALL, *MADE, "--set", "vocab_size=-5"], "no model can be made (RuntimeError"),
        ([*SMALL, *MADE, "--set", "hidden_size=wide"], "the config of gpt_oss cannot be set so"),
        ([*SMALL, *MADE, "--max-running", "0"], "max_sequences"),
        ([*SMALL, *MADE, "--step-tokens", "4"], "more than step_tokens, 4"),
        ([*SMALL, *MADE, "--json", "no/such/folder/x.json"], "no folder no/such/folder"),
        ([*SMALL, *MADE, "--json", "."], ". is a folder; name a file in it"),
        ([*SMALL, *MADE, "--plot", "runs.txt"], "runs.txt cannot be drawn into; let its name end with"),
        ([*SMALL, *MADE, "--memory", "much"], "much"),
        ([*SMALL, *MADE, "--memory", "4KiB"], "give more memory"),
        ([*SMALL, *MADE, "--memory", "10000000000GiB"], "more than there can be"),
        ([*SMALL, *MADE, "--host-memory", "much"], "much"),
        ([*SMALL, *MADE, "--kv-dtype", "int3"], "int3"),
        ([*SMALL, *MADE, "--device", "abacus"], "--device abacus is not h200, nor an object of flops_per_s"),
        ([*SMALL, *MADE, "--device", '{"flops_per_s": 1}'], "nor an object of flops_per_s"),
        (
            [*SMALL, *MADE, "--device", '{"flops_per_s": 0, "bytes_per_s": 1, "host_bytes_per_s": 1}'],
            "flops_per_s of a device is a positive number",
        ),
        ([*SMALL], "one of the arguments --trace --made is required"),
        (
            ["--config", "/no/such/folder", "--memory", "1GiB", *MADE, "--quiet"],
            "--config /no/such/folder is no model type, and",
        ),
    ],
    ids=lambda value: " ".join(value[11:]) if isinstance(value, list) else "",
)
def test_errors_are_told_in_words(capsys, arguments: list[str], words: str) -> None:
    assert words in error(capsys, *arguments)


def test_what_is_nested_too_deep_to_be_read_is_no_number(capsys) -> None:
    assert "shares such as" in error(capsys, *SMALL, *MADE, "--split", '{"full": ' + "[" * 100_000)
    assert "cannot be set so" in error(capsys, *SMALL, *MADE, "--set", "hidden_size=" + "[" * 100_000)


def test_a_config_that_is_none_is_told_in_words(capsys, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": "many"}')
    said = error(capsys, "--config", str(tmp_path), "--memory", "1GiB", *MADE)
    assert "no model can be made (StrictDataclassFieldValidationError" in said


def test_nothing_is_simulated_before_every_split_is_known_to_hold_a_request(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch_uma.simulate.__main__.replay", None)
    said = error(capsys, *SMALL, *MADE, "--split", "default", "--split", '{"full": 1}')
    assert "the pool cannot hold one request" in said


def test_splits_that_look_alike_have_columns_of_their_own(capsys, tmp_path: Path) -> None:
    """By the order of the sub-pools, with those that were not named; twice the same is once."""
    asked = ['{"full": 0.701}', '{"full": 0.701}', '{"full": 0.699, "window_128": 0.301}']
    read = reports(capsys, tmp_path, *MADE, *(argument for split in asked for argument in ("--split", split)))
    assert list(read) == ["arena", "split 0.30/0.70", "split 0.30/0.70 (2)"]


def test_keys_in_fewer_bits_take_less_time(capsys, tmp_path: Path) -> None:
    busy = ["--made", "12,2000,200,0", "--set", "num_hidden_layers=2", "--set", "hidden_size=64"]
    wide, narrow = (
        reports(capsys, tmp_path, *busy, *options)["arena"] for options in ([], ["--kv-dtype", "float8_e4m3fn"])
    )
    assert narrow["seconds"] < wide["seconds"]


def test_the_text_of_a_model_with_other_parts_is_simulated(capsys, tmp_path: Path) -> None:
    """Also where transformers has no class for its text alone, and where it is a part of a part."""
    for name in ("qwen2_5_vl_text", "qwen2_5_omni_text"):
        config = zoo.config_of(name)
        config.save_pretrained(tmp_path / name)
        path = tmp_path / f"{name}.json"
        made = ["--made", "4,20,5,0", "--memory", "1MiB", "--quiet", "--json", str(path)]
        seconds = []
        for options in ([], ["--set", "num_hidden_layers=8"]):
            assert main(["--config", str(tmp_path / name), *made, *options]) == 0
            seconds.append(json.loads(path.read_text())["arena"]["used_bytes"]["full"])
        assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.1)


def test_fewer_layers_follow_the_pattern_of_the_model(capsys, tmp_path: Path) -> None:
    """Whatever lists the config has for them; but not where their number follows from one."""
    path = tmp_path / "reports.json"
    made = ["--made", "1,20,5,0", "--memory", "1GiB", "--quiet", "--json", str(path), "--set", "num_hidden_layers=4"]
    assert main(["--config", "llama4_text", *made]) == 0
    used = json.loads(path.read_text())["arena"]["used_bytes"]
    assert used["chunk_8192"] == 3 * used["full"]
    assert main(["--config", "exaone_moe", *made]) == 0
    capsys.readouterr()
    assert "num_hidden_layers of nemotron_h follows from" in error(
        capsys, "--config", "nemotron_h", *made[:-1], "num_hidden_layers=3"
    )


def test_an_interrupt_ends_it_without_a_trace(capsys, monkeypatch) -> None:
    def replay(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_uma.simulate.__main__.replay", replay)
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, *MADE])
    assert caught.value.code == 130 and capsys.readouterr().err.endswith("interrupted\n")
