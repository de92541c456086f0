"""Breaks the code on purpose, one line at a time: for each mutant a named test must fail.

    python tests/drills/mutants.py
    python tests/drills/mutants.py --only clipping

Each mutant is a fault that all tests had once let pass: a piece of text in one file and what replaces it. The drill
copies the files of the repository to a temporary folder, makes sure that all named tests pass there, and then, for one
mutant after another, changes the file, runs the named test and restores the file. It prints a table, and exits with 1
if a test of a mutant passes (the mutant survived), if a test cannot be run, or if the text to replace is not in the
file exactly once, because the code has changed since: correct the entry in MUTANTS then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from rich.progress import track
from support.real_runs import REPOSITORY, DrillVerdict, print_verdicts

TESTS_FAILED = 1  # exit code of pytest; other codes mean that the tests did not run


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `original` becomes `mutated`; then `test` must fail."""

    name: str
    file: str
    original: str
    mutated: str
    test: str


MUTANTS = (
    Mutant(
        name="clipping: pretraining does not clip gradients",
        file="electra_dist/engine/engine.py",
        original='"gradient_clipping": clip_norm,',
        mutated='"gradient_clipping": 0.0,',
        test="tests/engine/test_gradient_clipping.py",
    ),
    Mutant(
        name="per_replica: the mean forgets the number of ranks",
        file="electra_dist/train/step.py",
        original="num_means = self._engine.num_micro_batches * dist.get_world_size()",
        mutated="num_means = self._engine.num_micro_batches",
        test="tests/train/test_step.py::"
        "test_per_replica_losses_are_the_means_of_the_micro_batches_averaged_over_all_ranks",
    ),
    Mutant(
        name="auc: the evaluation counts pads",
        file="electra_dist/train/evaluator.py",
        original="torch.where(output.is_real_BS, output.rtd_logit_BS, torch.nan)",
        mutated="output.rtd_logit_BS",
        test="tests/train/test_step.py::test_pads_count_neither_in_the_auc_of_an_evaluation_nor_in_its_other_measures",
    ),
    Mutant(
        name="electric: the label is 'differs' instead of 'was noised'",
        file="electra_dist/objectives/electric.py",
        original="label_BS = masking.slots_BS() > 0",
        mutated="label_BS = noised_BS != batch.ids_BS",
        test="tests/objectives/test_variants.py::"
        "test_electric_labels_every_noised_token_also_where_the_sample_is_the_original_token",
    ),
    Mutant(
        name="short targets: drawn from [5, S - 1]",
        file="electra_dist/corpus/sentence_pairs.py",
        original="num_targets = self._seq_len - MIN_TARGET + 1",
        mutated="num_targets = self._seq_len - MIN_TARGET",
        test="tests/corpus/test_sentence_pairs.py::"
        "test_short_targets_are_uniform_from_5_to_the_row_length_both_included",
    ),
    Mutant(
        name="examples: one more random draw for each example",
        file="electra_dist/corpus/sentence_pairs.py",
        original="        self._target = self._seq_len\n        if",
        mutated="        self._target = self._seq_len\n        self._random.random()\n        if",
        test="tests/corpus/test_sentence_pairs.py::test_all_examples_equal_those_of_a_builder_by_the_references_rules",
    ),
    Mutant(
        name="examples: a carried sentence is lost to the target of the next example",
        file="electra_dist/corpus/sentence_pairs.py",
        original="        self._add(carried)\n        self._draw_target()",
        mutated="        self._add(carried)\n        self._draw_target()\n        self._target += len(carried)",
        test="tests/corpus/test_sentence_pairs.py::test_all_examples_equal_those_of_a_builder_by_the_references_rules",
    ),
    Mutant(
        name="reference masking: rounded in float64",
        file="electra_dist/objectives/masking.py",
        original='in_float32 = objective.masking == "reference"',
        mutated="in_float32 = False",
        test="tests/objectives/test_masking.py::"
        "test_the_reference_rounds_the_number_of_masked_positions_in_float32_as_google_does",
    ),
    Mutant(
        name="adversarial: the reward goes to a sample that was not inserted",
        file="electra_dist/objectives/adversarial.py",
        original="states_MH, inserted_M, right_logit_M, weight_M,",
        mutated="states_MH, mlm.sampled_M, right_logit_M, weight_M,",
        test="tests/objectives/test_variants.py::test_adversarial_gradient_is_that_of_reinforce_with_a_baseline",
    ),
    Mutant(
        name="keep_best: mlm is judged by the discriminator's loss",
        file="electra_dist/train/saving/checkpointer.py",
        original='return {"eval_loss": evaluation.mlm_loss}',
        mutated='return {"eval_loss": evaluation.rtd_loss}',
        test="tests/train/test_evaluation_scores.py",
    ),
    Mutant(
        name="clipping: fine-tuning does not clip gradients",
        file="electra_dist/finetune/training_loop.py",
        original="torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm, foreach=True)",
        mutated="pass",
        test="tests/finetune/test_gradient_clipping.py",
    ),
    Mutant(
        name="export: the weights are not those of the checkpoint",
        file="electra_dist/pretrained/run_weights.py",
        original="weights=chosen.weights,",
        mutated="weights={name: tensor * 1.001 for name, tensor in chosen.weights.items()},",
        test="tests/pretrained/test_finished_run.py::test_exported_model_is_the_trained_one",
    ),
)


def main() -> int:
    """Apply the mutants, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="take only the mutants whose name contains this text")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    if not chosen:
        parser.error(f"no mutant's name contains {arguments.only!r}; see MUTANTS in {__file__}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_repository(copy)
        tests = sorted({mutant.test for mutant in chosen})
        code, output = run_tests(copy, tests)
        if code != 0:
            print(output[-3000:])
            print("error: the tests fail without a mutant; make them pass first", file=sys.stderr)
            return 1
        verdicts = [verdict_of(copy, mutant) for mutant in track(chosen, description="mutants")]
    return print_verdicts("faults that a test must find", verdicts)


def copy_repository(target: Path) -> None:
    """Copy the files that git knows, or would add, from the repository to `target`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        source = REPOSITORY / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def verdict_of(copy: Path, mutant: Mutant) -> DrillVerdict:
    """Apply one mutant to the copy, run its test, restore the file, and return the line of the table."""
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.original) != 1:
        detail = f"{mutant.file} does not have {mutant.original!r} exactly once; correct MUTANTS"
        return DrillVerdict(mutant.name, False, detail)
    path.write_text(text.replace(mutant.original, mutant.mutated))
    code, output = run_tests(copy, [mutant.test])
    path.write_text(text)
    if code == TESTS_FAILED:
        return DrillVerdict(mutant.name, True, f"{mutant.test.split('::')[0]} fails")
    if code == 0:
        return DrillVerdict(mutant.name, False, f"survived {mutant.test}")
    return DrillVerdict(mutant.name, False, f"pytest ended with {code}: {output[-200:]}")


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests of the copy on the code of the copy; return pytest's exit code and its output."""
    path = os.pathsep.join([str(copy), str(copy / "kernels")])
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
