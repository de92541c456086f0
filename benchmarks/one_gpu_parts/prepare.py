"""Makes carried/one_gpu.tar.xz and wheels/: all that `one_gpu.sh` needs on a machine without network.

Guarantee: the script fails if both together exceed 60 MB. The archive has at most `--tokens` tokens of training rows:
shards at equal distances over the whole corpus, with a corpus.json of their own. It is compressed, because a token
takes 16 bits in a shard, and less than half of that in the archive.

How: a folder of text is first built into corpora/small_one_gpu, with a vocabulary of its own; a build that was
interrupted is resumed, and a finished one is used again. Minimal pairs and a treebank for the scores at the end are
carried in the same archive.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_parts.carried_packages import TO_TRAIN, TO_TRAIN_WITHOUT_PLOTS, collect_wheels
from gpu_train_parts.make_carry import MOST_BYTES, folder_bytes
from one_gpu_parts.experiment import ARCHIVE, CONFIG, CORPUS, PAIRS, REPOSITORY, SMOKE, TREEBANK, config_of

from electra_dist.config import Config
from electra_dist.data.corpus_manifest import MANIFEST_KEY, CorpusManifest, ShardEntry, read_manifest, write_manifest
from electra_dist.errors import EXIT_USER_ERROR, UserError
from electra_dist.finetune.sentences.pair_files import read_pair_files
from electra_dist.finetune.treebank.conllu_files import read_treebank
from electra_dist.store.open_store import open_store

_HELDOUT = "heldout"
_HELDOUT_SHARE = 0.02  # of the tokens of training rows: the most that is carried for evaluation


def build(text: Path, output: Path, settings: Sequence[str]) -> None:
    """Build a corpus and its vocabulary from a folder of text; a finished corpus is left as it is.

    Args:
        text: folder of text files, in any format of `electra-dist corpus build`.
        output: folder of the corpus.
        settings: KEY=VALUE changes of the configuration.

    Raises:
        subprocess.CalledProcessError: the build failed; its message was printed.
    """
    command = [sys.executable, "-c", "from launcher.cli.main import main; main()", "corpus", "build"]
    command += ["--input", str(text.absolute()), "--output", str(output.absolute()), "--config", str(CONFIG)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def spread_shards(shards: Sequence[ShardEntry], max_tokens: int) -> tuple[ShardEntry, ...]:
    """Return as many shards as have at most `max_tokens` tokens, at equal distances over the corpus.

    Shards follow the order of the text, so the first ones alone would be a few of its files.

    Raises:
        UserError: no shard is small enough.
    """
    for count in range(len(shards), 0, -1):
        chosen = [shards[index * len(shards) // count] for index in range(count)]
        if sum(shard.tokens for shard in chosen) <= max_tokens:
            return tuple(chosen)
    raise UserError(
        f"the smallest choice of shards has more than {max_tokens:,} tokens; build the corpus with a smaller "
        f"corpus.shard_size_mb, or raise --tokens"
    )


def copy_sample(source: Path, target: Path, max_tokens: int, config: Config) -> CorpusManifest:
    """Copy shards with at most `max_tokens` tokens of a corpus into a new corpus, and return its manifest.

    Args:
        source: folder of a finished corpus.
        target: folder of the new one; it must not exist.
        max_tokens: most tokens of the new corpus.
        config: the configuration that will read it.

    Raises:
        UserError: the corpus has other rows or another vocabulary size than the configuration.
        StoreMissing: `source` holds no finished corpus.
    """
    manifest = read_manifest(open_store(str(source)))
    wanted = (config.data.seq_len, config.model.vocab_size)
    if (manifest.seq_len, manifest.tokenizer.vocab_size) != wanted:
        raise UserError(
            f"{source}: rows of {manifest.seq_len} tokens and {manifest.tokenizer.vocab_size:,} entries in the "
            f"vocabulary, but {CONFIG.name} needs {wanted[0]} and {wanted[1]:,}; build the corpus with --config "
            f"configs/{CONFIG.name}, or name a folder of text"
        )
    shards = spread_shards(manifest.shards, max_tokens)
    sample = manifest.model_copy(
        update={
            "shards": shards,
            "builder": {**manifest.builder, "sampled_shards": f"{len(shards)} of {len(manifest.shards)}"},
            # Counts of the whole corpus would be wrong.
            "totals": {"rows": sum(shard.rows for shard in shards), "tokens": sum(shard.tokens for shard in shards)},
        }
    )
    target.mkdir(parents=True)
    for name in (manifest.tokenizer.vocab_file, *(shard.name for shard in shards)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    write_manifest(open_store(str(target)), sample)
    return sample


def pack(corpus: Path, arguments: argparse.Namespace, config: Config, archive: Path) -> None:
    """Write the archive: a sample of a corpus, its held-out rows, minimal pairs and a treebank.

    Args:
        corpus: folder of a finished corpus, with held-out rows in `heldout/`.
        arguments: the command line.
        config: the configuration that will read the corpus.
        archive: file to write; its folder is made if it is missing.

    Raises:
        UserError: the corpus, a file of minimal pairs or the treebank cannot be used.
    """
    # What the last leg could not read is refused here, where it can be corrected.
    read_pair_files(arguments.pairs)
    if arguments.treebank:
        read_treebank(arguments.treebank)
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / CORPUS
        sample = copy_sample(corpus, copied, arguments.tokens, config)
        heldout_tokens = round(_HELDOUT_SHARE * arguments.tokens)
        heldout = copy_sample(corpus / _HELDOUT, copied / _HELDOUT, heldout_tokens, config)
        print(
            f"compressing {sample.num_tokens:,} tokens of training rows, {heldout.num_tokens:,} held-out", flush=True
        )
        with tarfile.open(partial, "w:xz") as tar:
            tar.add(copied, CORPUS)
            for path in arguments.pairs:
                tar.add(path, f"{PAIRS}/{path.name}")
            if arguments.treebank:
                for path in sorted(arguments.treebank.glob("*.conllu")):
                    tar.add(path, f"{TREEBANK}/{path.name}")
    partial.rename(archive)


def main() -> None:
    """Make the archive and the folder of wheels, and check their size; print a user's error as one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of text, or of a finished corpus")
    parser.add_argument("--tokens", type=int, default=25_000_000, help="most tokens carried (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=Path, action="append", default=[], help="minimal pairs to score: file or folder"
    )
    parser.add_argument("--treebank", type=Path, help="folder of CoNLL-U files, for probes of tags and heads")
    parser.add_argument("--python", default="3.12", help="Python version of the target (default: %(default)s)")
    parser.add_argument("--no-plots", action="store_true", help="the target has matplotlib (saves 25 MB)")
    parser.add_argument("--no-wheels", action="store_true", help="the target has all packages")
    parser.add_argument("--smoke", action="store_true", help="prepare the toy run on the CPU")
    parser.add_argument("--output", type=Path, default=REPOSITORY, help="where carried/ and wheels/ are made")
    arguments = parser.parse_args()
    settings = SMOKE if arguments.smoke else []
    archive = arguments.output / "carried" / ARCHIVE
    wheels = arguments.output / "wheels"
    try:
        corpus = arguments.corpus
        if not (corpus / MANIFEST_KEY).exists():
            corpus = arguments.output / "corpora" / ("small_one_gpu_smoke" if arguments.smoke else "small_one_gpu")
            build(arguments.corpus, corpus, settings)
        pack(corpus, arguments, config_of(settings), archive)
        shutil.rmtree(wheels, ignore_errors=True)
        if not arguments.no_wheels:
            collect_wheels(TO_TRAIN_WITHOUT_PLOTS if arguments.no_plots else TO_TRAIN, wheels, arguments.python)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has printed why
    archive_bytes = archive.stat().st_size
    wheels_bytes = folder_bytes(wheels)
    print(f"{archive}: {archive_bytes / 1e6:.1f} MB; {wheels}: {wheels_bytes / 1e6:.1f} MB")
    if archive_bytes + wheels_bytes > MOST_BYTES:
        sys.exit(
            f"together {(archive_bytes + wheels_bytes) / 1e6:.1f} MB, more than the {MOST_BYTES / 1e6:.0f} MB that "
            f"are carried: lower --tokens, or add --no-plots if the target has matplotlib"
        )


if __name__ == "__main__":
    main()
