"""What every command has: -h, --version, completion, JSON, tables that survive a pipe, and one line for each error."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from electra_launcher import pretrain
from electra_launcher.chaos import __main__ as chaos
from electra_launcher.cli import command_output, main, run_facts
from electra_launcher.cli.checkpoint import _checkpoints_to_verify, find_checkpoint
from electra_launcher.cli.main import COMMANDS, _CorpusCommands, app
from electra_launcher.slurm import submit as slurm_submit
from electra_launcher.slurm.batch_script import JobOptions
from electra_launcher.supervise.supervisor import lock_node
from support.corpus_texts import BUILD_CONFIG, make_prose, make_vocabulary
from support.hostile_text import HOSTILE, assert_shown
from support.run_records import STEP
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from electra_dist.config import Config
from electra_dist.config.keys import fields
from electra_dist.data.manifest import read_manifest
from electra_dist.errors import EXIT_STOPPED, UserError, error_line
from electra_dist.run.lease import take_lease
from electra_dist.run.ledger import Ledger
from electra_dist.run.records import encode
from electra_dist.store.open_store import LocalStore
from electra_dist.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "configs" / "demo_cpu_bert.yaml"
LARGE = REPOSITORY / "configs" / "large_25pct_mask.yaml"
MakeConfig = Callable[..., Path]


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `electra-dist` with its output in a pipe."""
    program = "import sys; sys.argv[0] = 'electra-dist'; from electra_launcher.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.real_start
def test_help_and_completion_list_every_command_and_import_none_of_them() -> None:
    program = "import sys; sys.argv[0] = 'electra-dist'; from electra_launcher.cli.main import app; "
    listing = program + "app(standalone_mode=False)"
    loaded = "print('LOADED', [name for name in sys.modules if name.startswith('electra_launcher.cli.')])"
    done = subprocess.run(
        [sys.executable, "-c", f"{listing}\n{loaded}", "-h"], capture_output=True, text=True, timeout=60
    )
    assert all(f" {name} " in done.stdout for name in COMMANDS), done.stderr
    assert "Show where a run stands" in done.stdout  # the first line of the function's docstring
    (loaded_names,) = re.findall(r"LOADED (.*)", done.stdout)
    assert set(ast.literal_eval(loaded_names)) <= {"electra_launcher.cli.main", "electra_launcher.cli.corpus"}
    completion = {"_ELECTRA_DIST_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert command(**completion, COMP_WORDS="electra-dist co").stdout.split() == ["corpus", "config", "compare"]


def test_the_help_groups_the_commands_and_begins_with_train() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    headings = ("Train", "Before a run", "After a run", "Cluster")
    places = [re.search(rf"^[^\w\n]+ {heading} ", shown, re.MULTILINE) for heading in headings]
    begins = [place.start() for place in places if place]
    assert len(begins) == len(headings) and begins == sorted(begins), shown
    listed = re.findall(r"^\W+([a-z-]+)  ", shown[begins[0] :], re.MULTILINE)
    assert listed[0] == "train" and listed.index("status") < listed.index("corpus") < listed.index("export")


@pytest.mark.real_start
def test_the_help_of_a_command_loads_nothing_that_only_its_work_needs() -> None:
    groups = [COMMANDS, *_CorpusCommands.groups.values()]
    modules = {module for group in groups for module, _ in group.values()}
    heavy = ("torch", "numpy", "matplotlib", "electra_dist.config", "rich.progress", "rich.table")
    program = f"import sys, {', '.join(sorted(modules))}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.real_start
def test_status_and_corpus_info_load_only_what_reads_records() -> None:
    """A person waits for them most often: no module that asks for hardware, computes or encodes texts."""
    program = (
        "import sys, electra_launcher.cli.status\n"
        "from electra_dist.run.records import Record\n"
        "print([name for name in ('psutil', 'pynvml') if name in sys.modules])\n"
        "print([kind.__name__ for kind in Record.__subclasses__() if kind.__pydantic_complete__])\n"
        "import electra_dist.corpus.build_console, electra_dist.data.manifest, electra_dist.store.open_store\n"
        "print([name for name in ('numpy', 'tokenizers', 'torch') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n[]\n[]\n", done.stdout + done.stderr


MISTAKES = """
train nothere.yaml; train . --gpus 1; status nothere; why nothere; export nothere; export . --checkpoint x
export nothere --layout revisions; export . --license "A B"; report nothere; report runs nothere
verify nothere; verify nothere --bytes; checkpoint list nothere; checkpoint verify nothere
checkpoint repair nothere; checkpoint diff nothere there; score --model nothere texts.txt
score --model random:x.yaml nothere.txt; score --model random:x.yaml texts.txt; minimal-pairs nothere
minimal-pairs random:x.yaml; minimal-pairs random:small.yaml --file nothere.jsonl; compare nothere.yaml
finetune --model nothere --data nothere.csv; finetune --model nothere --data texts.txt --set lr=x
predict nothere texts.txt; plan nothere.yaml; config nothere.yaml; resolve nothere.yaml; speed nothere.yaml
submit --config nothere.yaml --nodes 1 --time 1:00:00; init old; corpus prepare nothere.yaml
corpus vocab --input nothere --output v.txt; corpus build --input nothere --output o --config small.yaml
corpus build --input texts.txt --output o --config nothere.yaml; corpus merge nothere; corpus info nothere
corpus stats nothere; corpus find nothere word; corpus plan --input nothere
corpus index nothere --vocab nothere.txt; exprot nothere
"""


@pytest.mark.real_start
def test_a_mistake_is_found_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """All mistakes are made in one process, so the first one that loads a heavy library names itself."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pretrain.yaml").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "texts.txt").write_text("one text\n")
    (tmp_path / "small.yaml").write_text((REPOSITORY / "configs" / "small.yaml").read_text())
    (tmp_path / "defaults.yaml").write_text((REPOSITORY / "configs" / "defaults.yaml").read_text())
    program = f"""
import shlex, sys
from electra_launcher.cli.main import app
heavy = ("torch", "matplotlib", "transformers", "deepspeed", "scipy", "sklearn", "datatrove")
for mistake in {MISTAKES!r}.replace(chr(10), ";").split(";"):
    if not mistake.strip():
        continue
    try:
        app(shlex.split(mistake), standalone_mode=False)
        print("ACCEPTED", mistake)
    except BaseException as error:
        print("REFUSED", mistake, type(error).__name__, error)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        print("HEAVY", mistake, loaded)
        break
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "HEAVY" not in done.stdout, done.stdout[-2000:]
    assert "ACCEPTED" not in done.stdout, done.stdout
    assert done.stdout.count("REFUSED") == len(re.findall(r"[^;\n]+", MISTAKES)), done.stdout + done.stderr


# Commands that compute with no tensor. The run reads the corpus, and has logged one step.
WITHOUT_TENSORS = """
corpus vocab --input texts --output v.txt --size 300
corpus build --input texts --output corpus --vocab vocab.txt --config run/config.yaml
corpus info corpus; corpus stats corpus; corpus find corpus the; corpus find corpus the --run run
config run/config.yaml; plan run/config.yaml; status run; why run; report run; verify run
"""


@pytest.mark.real_start
def test_commands_that_compute_with_no_tensor_do_not_import_torch(tmp_path: Path) -> None:
    """All work in one process, so the first one that imports torch, which takes more than a second, names itself."""
    vocabulary = make_vocabulary()
    (tmp_path / "vocab.txt").write_text(vocabulary.text)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "prose.txt").write_text("\n\n".join(make_prose(60, seed=3)))
    (tmp_path / "run").mkdir()
    config = BUILD_CONFIG.format(vocab_size=vocabulary.size).replace("unused, seq", "corpus, seq")
    (tmp_path / "run" / "config.yaml").write_text(config.replace("unused", "run"))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(encode(STEP))
    program = f"""
import shlex, sys
from electra_launcher.cli.main import app
for command in {WITHOUT_TENSORS!r}.strip().replace(chr(10), ";").split(";"):
    app(shlex.split(command), standalone_mode=False)
    assert "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("arguments", [[name] for name in COMMANDS] + [["checkpoint", "diff"]])
def test_every_command_has_the_short_help_option(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, [*arguments, "-h"])
    assert shown.exit_code == 0 and "Usage:" in shown.stdout


# Options that stand for an argument, or that are nothing unless they are given.
NOTHING_UNLESS_GIVEN = {"--config", "--run", "--model", "--source", "--document", "--from", "--setup"}


def test_the_help_of_every_option_says_what_holds_without_it() -> None:
    """Flags, and options that may be repeated, are off and empty without a word."""

    def commands_below(command: Any) -> Iterator[Any]:
        if isinstance(command, main.LazyGroup):
            for name, place in command._places.items():
                yield from commands_below(main._import_command(name, *place))
        elif isinstance(command, TyperGroup):
            for inner in command.commands.values():
                yield from commands_below(inner)
        else:
            yield command

    checked = 0
    for one in commands_below(get_command(app)):
        for option in one.params:
            name = option.opts[0]
            if not name.startswith("--") or option.required or option.is_flag or option.multiple:
                continue
            checked += 1
            is_shown = option.default is not None and option.show_default
            assert is_shown or "default" in option.help.lower() or name in NOTHING_UNLESS_GIVEN, (one.name, name)
    assert checked > 80


def test_lines_of_progress_become_rarer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A process of a day that reports every second gets a first line after 3 s, and one every 300 s in the end."""
    clock = 0.0
    monkeypatch.setattr(command_output.time, "monotonic", lambda: clock)
    times = []
    with command_output.progress_bar(command_output.open_console()) as report:
        for second in range(86_401):
            clock = float(second)
            report("train" if second < 50 else "predict", second % 50 if second < 50 else second - 50, 86_350)
            if capsys.readouterr().out:
                times.append(second)
        clock += 1000.0
        report("predict", 43_175, 86_350)
    assert times[:5] == [3, 13, 23, 33, 43] and times[-1] - times[-2] == 300 and len(times) < 350
    assert capsys.readouterr().out == "predict: 43,175 of 86,350, about 87,350 s left\n"


def test_lines_of_verified_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command_output, "_LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(command_output, "_MOST_PAUSE_S", 0.0)
    with command_output.byte_progress(command_output.open_console(), None) as advance:
        advance(2_000_000)
    assert capsys.readouterr().out == "verified: 0 MB\nverified: 2 MB\n"


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"electra-dist {VERSION}\n"


def test_tables_in_a_pipe_are_whole_and_without_colours() -> None:
    """A terminal of 40 columns and a wish for colours do not change what a pipe receives."""
    done = command("config", DEMO, COLUMNS="40", FORCE_COLOR="1")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if " checkpoint.every_steps " in line]
    assert str(DEMO) in row
    assert not any(mark in done.stdout for mark in ("…", "..."))


def test_descriptions_of_keys_are_text_of_at_most_100_columns_in_a_pipe() -> None:
    lines = command("config", DEMO, "--describe", COLUMNS="40").stdout.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("checkpoint.every_steps: ")]
    assert lines[number].endswith(f"({DEMO})")
    described = itertools.takewhile(lambda line: line.startswith("    "), lines[number + 1 :])
    assert " ".join(line.strip() for line in described) == fields(Config)["checkpoint.every_steps"].description
    assert max(len(line) for line in lines if line.startswith("    ")) <= 100


def test_plan_prints_the_numbers_of_the_budget_as_json() -> None:
    tree = json.loads(CliRunner().invoke(app, ["plan", str(LARGE), "--json", "--nodes", "2"]).stdout)
    assert round(tree["parameters"]["total"] / 1e6, 2) == 354.66
    assert tree["tokens"] == 400_000 * 2048 * 512
    # The paper's schedule: the decay has taken 10,000 of 400,000 steps off the peak.
    assert tree["learning_rate"] == {"lr": 2e-4, "peak": pytest.approx(2e-4 * 0.975), "peak_step": 10_000}
    assert [row["nodes"] for row in tree["scaling"]] == [1, 2]


def test_a_keyboard_interrupt_ends_every_program_with_75_and_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_config: MakeConfig
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_facts, "gather", interrupted)
    assert CliRunner().invoke(app, ["status", "run"]).exit_code == EXIT_STOPPED
    monkeypatch.setattr(pretrain, "_pretrain", interrupted)
    assert pretrain.main(["--config", str(tiny_config())]) == EXIT_STOPPED
    monkeypatch.setattr(chaos, "drill", interrupted)
    assert chaos.main([str(tiny_config())]) == EXIT_STOPPED
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_is_one_line_also_with_a_line_break_in_a_file_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = tmp_path / "a\nb\x1b[31m.yaml"
    monkeypatch.setattr(sys, "argv", ["electra-dist", "config", str(name)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr().err
    assert ended.value.code == 78
    assert printed.count("\n") == 1 and "a\\nb\\x1b[31m.yaml: no such config file" in printed
    assert error_line(ValueError(os.fsdecode(b"text-\xff.txt"))) == "error: text-\\udcff.txt"


def test_a_current_folder_that_has_been_deleted_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(
        sys, "argv", ["electra-dist", "corpus", "build", "--input", "a", "--vocab", "b", "--output", "c"]
    )
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 78
    assert capsys.readouterr().err.startswith("error: the current folder has been deleted; ")


@pytest.mark.parametrize("limit", ["banana", "24h", "1:2:3:4", "", "24:00:00\n"])
def test_a_time_limit_that_slurm_does_not_know_is_refused(limit: str, tiny_config: MakeConfig) -> None:
    arguments = ["submit", "--config", str(tiny_config()), "--nodes", "1", "--gpus-per-node", "1", "--time", limit]
    refused = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert "--time" in str(refused.exception) and "24:00:00" in str(refused.exception)


@pytest.mark.parametrize("limit", ["60", "60:00", "24:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_every_form_of_a_time_limit_is_accepted(limit: str, tiny_config: MakeConfig) -> None:
    arguments = ["submit", "--config", str(tiny_config()), "--nodes", "1", "--gpus-per-node", "1", "--time", limit]
    accepted = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert accepted.exit_code == 0 and f"#SBATCH --time={limit}" in accepted.stdout


def test_keys_and_values_of_a_config_of_others_are_shown_escaped(tiny_config: MakeConfig) -> None:
    config = tiny_config(**{"cluster.notify": HOSTILE, "corpus.licences": {HOSTILE: HOSTILE}})
    result = CliRunner().invoke(app, ["config", str(config)])
    assert result.exit_code == 0, result.output
    assert_shown(result.output, times=3)
    assert CliRunner().invoke(app, ["resolve", str(config)]).output.replace("\n", "").isprintable()


def test_an_unknown_key_that_holds_controls_is_quoted_escaped(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["electra-dist", "config", str(tiny_config(**{"model.[/]\x1b[2J\u202e": 1}))])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 78
    assert "unknown key `model.[/]\\x1b[2J\\u202e`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest"), [(["finetun"], "finetune"), (["tran"], "train"), (["corpus", "bild"], "build")]
)
def test_a_mistyped_command_gets_its_nearest_name(words: list[str], nearest: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"Did you mean '{nearest}'?" in " ".join(done.output.split())


def test_every_printed_command_quotes_a_folder_with_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    lock_node(run, 1)
    lease = take_lease(run, "supervisor", say=print)

    def refusal(call: Callable[..., object], *arguments: object, **options: object) -> str:
        with pytest.raises(UserError) as error:
            call(*arguments, **options)
        return str(error.value)

    texts = [
        refusal(find_checkpoint, str(run)),
        refusal(_checkpoints_to_verify, str(run), None, None),
        refusal(read_manifest, LocalStore(run)),
        refusal(lock_node, run, 1),
        refusal(take_lease, run, "rank 0", say=print),
    ]
    lease.release()
    with contextlib.closing(Ledger(run)) as ledger:
        ledger.append("done", 5)
    options = JobOptions(num_nodes=1, gpus_per_node=1)
    texts.append(refusal(slurm_submit.check, DEMO, [f"run_dir={run}"], [], options, ["electra-dist"]))
    (run / "metrics.jsonl").write_text("damaged\n")
    pretrain._write_report(run)
    texts.append(capsys.readouterr().err)
    for text in texts:
        (command_text,) = re.findall("`([^`]*my run[^`]*)`", text)
        assert any(Path(word).is_relative_to(run) for word in shlex.split(command_text)), text
