"""Run the training and prediction loops of fine-tuning in one process on one device.

Guarantee: the rows and the dropout of step t depend only on (seed, t) and the settings. A training that was
interrupted and starts again from step 0 therefore ends with the same numbers: bit for bit on a CPU with the same
number of threads. All rows come from one infinite sequence, which in each pass over the examples is a new permutation,
a function of seed and pass. Step t takes the elements [t * batch, (t + 1) * batch) of this sequence. There are
int(examples * epochs / batch) steps, at least one.

The head learns at the peak rate lr, and lower layers learn more slowly. Let L be the number of layers and d
the setting `layer_decay`. Layer i, counted from 0 at the bottom, has the peak rate lr * d ** (L + 1 - i), so the top
layer has lr * d ** 2. The embeddings and their projection have lr * d ** (L + 2). The top layer is two factors d below
the head because the reference counts a pooler between them, which does not exist. With `lr_decay_quirk: false` this
factor is dropped: the top layer has lr * d, and the embeddings have lr * d ** (L + 1).

The schedule multiplies every peak rate by (1 - t / T) * min(1, t / (warmup_fraction * T)), where t is the number of
finished updates and T is their total. With a warm-up, the first update (t = 0) therefore has a learning rate of 0.

How: fp32 on a CPU; fp32 weights with bf16 autocast on a GPU. Each batch is padded to its longest row, rounded up to a
multiple of 8. Prediction processes the rows in order of length.

Cost: one forward and backward of the encoder per step; losses are copied to the host every 16 steps, so the device is
rarely synchronized.

Limits: on a GPU the order of some sums is not fixed, so the last bits may differ between two runs.

Source: google-research/electra, model/optimization.py (`_get_layer_lrs`), issues 51 and 64. AdamW without bias
correction is the optimizer of pretraining (`engine/foreach_optimizers.py`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.engine.foreach_optimizers import ForeachAdamW
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import TaskModel
from electra_dist.model.encoder import DropoutKeys

_LAYER = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.")  # after the encoder's prefix
_FINAL_NORM = re.compile(r"(?:encoder\.)?final_norm\.")


def peak_lr(name: str, encoder_prefix: str, num_layers: int, settings: FinetuneConfig) -> float:
    """Return a parameter's peak learning rate: `settings.lr` in the head, and less in each lower layer of the encoder.

    The names of the encoder's parameters begin with `encoder_prefix`. In the architecture `modern`, the LayerNorm
    after the last layer has the peak rate of the top layer.
    """
    if not name.startswith(encoder_prefix):
        return settings.lr
    name = name.removeprefix(encoder_prefix)
    # Depth counts from the embeddings (0) over layer 0 (1) to the head. The reference reserves the depth below the
    # head for a pooler that does not exist, hence the quirk.
    head_depth = num_layers + 2 if settings.lr_decay_quirk else num_layers + 1
    layer = _LAYER.match(name)
    if layer:
        layer_number = int(layer[1])
        depth = layer_number + 1
    elif _FINAL_NORM.match(name):
        depth = num_layers
    else:
        depth = 0  # the embeddings and their projection
    return settings.lr * settings.layer_decay ** (head_depth - depth)


def schedule(step: int, num_steps: int, settings: FinetuneConfig) -> float:
    """Return the factor by which update `step` (from 0) multiplies every peak learning rate: warm-up times decay.

    Both are linear. The decay also runs during the warm-up, so with a warm-up the factor never reaches 1.
    """
    warmup_steps = settings.warmup_fraction * num_steps
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warmup * (1.0 - step / num_steps)


def layerwise_adamw(model: TaskModel, num_layers: int, settings: FinetuneConfig) -> ForeachAdamW:
    """Build an AdamW optimizer whose learning rates decrease from the head of a `TaskModel` down to the embeddings.

    All parameter groups start with a learning rate of 0: call `set_step` before every update, or nothing is learnt.
    Biases and LayerNorm weights have no weight decay.
    """
    layer_norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    parameters_of: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)  # keyed by (peak, decay)
    for name, parameter in model.named_parameters():
        # "network.backbone.embeddings.norm.bias" is the parameter "bias" of the module before it.
        module_name, _, short_name = name.rpartition(".")
        is_decayed = module_name not in layer_norms and short_name != "bias"
        decay = settings.weight_decay if is_decayed else 0.0
        peak = peak_lr(name, model.encoder_prefix, num_layers, settings)
        parameters_of[peak, decay].append(parameter)
    param_groups: list[dict[str, Any]] = [
        {"params": parameters, "lr": 0.0, "peak_lr": peak, "weight_decay": decay}
        for (peak, decay), parameters in parameters_of.items()
    ]
    return ForeachAdamW(
        param_groups,
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def set_step(optimizer: ForeachAdamW, factor: float) -> None:
    """Set each parameter group's learning rate for the next update: its peak rate times `factor`, from `schedule`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


T = TypeVar("T")
Ids = Sequence[Sequence[int]]
Progress = Callable[[str, int, int], None]  # called with (activity, parts done, parts in total)

# Seeds of dropout are derived from (seed, purpose, number). Torch's own dropout uses the step as the number; the
# encoder's keyed dropout uses this constant. No step reaches it, so the two kinds of dropout never share a seed.
_KEYED_DROPOUT = 2**32 - 1
_PAD_TO = 8  # padded lengths are multiples of this, in tokens, which suits the tensor cores of a GPU
_CHECK_EVERY = 16  # steps between checks of the loss, each of which synchronizes with the device


class Examples(NamedTuple):
    """Training examples of a task: for each one a row of token ids without padding, and K targets to predict."""

    ids: Ids
    target_NK: torch.Tensor  # int64 labels or positions; fp32 for a regression


class Trained(NamedTuple):
    """Result of a training: the mean loss over the last tenth of the steps, and the number of steps made."""

    loss: float
    steps: int  # fewer than planned if it stopped early


class Diverged(UserError):
    """Error: a loss or an output of a model is NaN or infinite; the message says where and what to change."""


def quiet(what: str, done: int, total: int) -> None:
    """Do nothing with a progress report; this is the default of parameters named `progress`."""


def count_steps(num_examples: int, settings: FinetuneConfig) -> int:
    """Return the number of optimizer steps: examples * epochs / batch size, rounded down, at least 1.

    Rows that do not fill a last batch are not used. If all epochs together have fewer rows than a batch, rows are
    repeated to fill it.
    """
    return max(1, int(num_examples * settings.epochs / settings.batch))


def fit(
    model: TaskModel,
    num_layers: int,
    examples: Examples,
    settings: FinetuneConfig,
    seed: int,
    progress: Progress = quiet,
    score: Callable[[], float] | None = None,
) -> Trained:
    """Train `model` in place, on the device of its parameters; return its mean last loss and the number of steps.

    The loss is the mean over the last tenth of the steps, rounded down, but at least one step. The model is left in
    training mode; the state of torch's global generator is the same afterwards as before. `num_layers` is the number
    of the encoder's layers. `progress` is called before the first step and after each one, with a text that names
    epochs and examples, the steps done and the steps in total. Raises Diverged if the loss became NaN or infinite; it
    is checked every 16 steps only, because each check waits for the device.

    With the setting `early_stopping`, `score` is called after each step that ends an epoch, and after the last step,
    with the model in evaluation mode. The model ends with the weights of the highest score, the first of equal ones.
    """
    best = None if score is None or settings.early_stopping == 0 else _BestWeights(model, score)
    device = next(model.parameters()).device
    num_steps = count_steps(len(examples.ids), settings)
    epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs:g} epochs"
    activity = f"train for {epochs} of {len(examples.ids):,} examples, steps of {settings.batch}"
    optimizer = layerwise_adamw(model, num_layers, settings)
    endless_rows = row_sequence(len(examples.ids), seed)
    losses: list[torch.Tensor] = []  # one scalar per step, on the device
    model.train()
    # Dropout sets torch's global generators in each step; the caller's state is restored at the end.
    devices_to_restore = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices_to_restore):
        progress(activity, 0, num_steps)
        for step in range(num_steps):
            batch_rows = list(itertools.islice(endless_rows, settings.batch))
            loss = _batch_loss(model, examples, batch_rows, seed, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm, foreach=True)
            set_step(optimizer, factor=schedule(step, num_steps, settings))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            is_last = step == num_steps - 1
            if step % _CHECK_EVERY == 0 or is_last:
                _check_finite(losses)
            progress(activity, step + 1, num_steps)
            if best is not None and (is_last or _ends_epoch(step, settings.batch, len(examples.ids))):
                _check_finite(losses)
                best.update()
                if best.num_worse >= settings.early_stopping:
                    break
    if best is not None:
        best.restore()
    num_averaged = max(1, num_steps // 10)
    return Trained(float(torch.stack(losses[-num_averaged:]).mean()), len(losses))


def _ends_epoch(step: int, batch: int, num_examples: int) -> bool:
    """Return whether step `step` (from 0), of `batch` rows, takes the last row of a pass over the examples."""
    return (step + 1) * batch // num_examples > step * batch // num_examples


class _BestWeights:
    """Copy of the weights, on the host, with which a model had its highest score."""

    def __init__(self, model: TaskModel, score: Callable[[], float]) -> None:
        self._model = model
        self._score = score
        self._highest = -math.inf
        self._weights: dict[str, torch.Tensor] = {}
        self.num_worse = 0  # evaluations since the highest score

    def update(self) -> None:
        self._model.eval()
        score = self._score()
        self._model.train()
        self.num_worse += 1
        if score > self._highest or not self._weights:
            self._highest = score
            self._weights = {name: value.cpu().clone() for name, value in self._model.state_dict().items()}
            self.num_worse = 0

    def restore(self) -> None:
        self._model.load_state_dict(self._weights)


@torch.no_grad()
def predict(
    function: Callable[[torch.Tensor], T],
    ids: Ids,
    pad: int,
    batch: int,
    device: torch.device,
    progress: Progress = quiet,
) -> Iterator[tuple[list[int], T]]:
    """Apply `function` to all rows in batches without gradients; yield (row numbers, output) for each batch.

    `function` gets padded ids, int64 [B, S] on `device`, under autocast (bf16 on a GPU). Rows of similar length share
    a batch, and the longest come first, so that lack of memory shows at the first batch. The caller uses the row
    numbers to put the outputs back in order. `progress` is called after each batch with ("predict", rows done, rows in
    total). Raises Diverged if an output is NaN or plus infinity; minus infinity, the log-probability of the
    impossible, is allowed.
    """
    num_rows = len(ids)
    longest_first = sorted(range(num_rows), key=lambda row: -len(ids[row]))
    for start in range(0, num_rows, batch):
        batch_rows = longest_first[start : start + batch]
        ids_BS = padded([ids[row] for row in batch_rows], pad).to(device)
        with autocast(device):
            output = function(ids_BS)
        _check_outputs(output)
        progress("predict", start + len(batch_rows), num_rows)
        yield batch_rows, output


def _check_outputs(output: object) -> None:
    """Raise `Diverged` if a model's output, a tensor or a tuple of tensors, contains NaN or plus infinity."""
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and not bool((tensor < math.inf).all()):
            raise Diverged("outputs of the model are not finite: it has diverged; give an earlier checkpoint")


def row_sequence(num_examples: int, seed: int) -> Iterator[int]:
    """Yield row numbers endlessly: in each pass a new permutation of all rows, which depends on seed and pass only."""
    epoch = 0
    while True:
        generator = np.random.default_rng(derive_seed(seed, Purpose.ROW_ORDER, epoch))
        yield from generator.permutation(num_examples).tolist()
        epoch += 1


def padded(rows: Ids, pad: int) -> torch.Tensor:
    """Return rows as one int64 tensor [B, S] on the host, filled with `pad` at their ends; S is a multiple of 8."""
    longest = max(len(row) for row in rows)
    length = math.ceil(longest / _PAD_TO) * _PAD_TO
    padded_rows = []
    for row in rows:
        padding = [pad] * (length - len(row))
        padded_rows.append([*row, *padding])
    return torch.tensor(padded_rows)


def autocast(device: torch.device) -> torch.autocast:
    """Return a context manager that runs operations in bf16 on a GPU, and changes nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _batch_loss(model: TaskModel, examples: Examples, rows: Sequence[int], seed: int, step: int) -> torch.Tensor:
    """Return the mean loss of a training batch, with gradient; seed torch's global generator for this step."""
    device = next(model.parameters()).device
    ids_BS = padded([examples.ids[row] for row in rows], model.special.pad).to(device)
    target_BK = examples.target_NK[list(rows)].to(device)
    # Dropout draws from torch's global generator, except that an encoder of this project uses keys.
    torch.manual_seed(derive_seed(seed, Purpose.DROPOUT, step))
    dropout_keys = DropoutKeys(
        seed=derive_seed(seed, Purpose.DROPOUT, _KEYED_DROPOUT),
        step=step,
        row_B=torch.arange(len(rows), device=device),
        backend="auto",
    )
    with autocast(device):
        loss: torch.Tensor = model(ids_BS, target_BK, dropout_keys)
    return loss


def _check_finite(losses: Sequence[torch.Tensor]) -> None:
    """Raise `Diverged` for the first NaN or infinite loss among the last 16 losses."""
    recent_losses = torch.stack(list(losses[-_CHECK_EVERY:])).tolist()
    first_step = len(losses) - len(recent_losses)
    for step, loss in enumerate(recent_losses, start=first_step):
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}; lower lr or raise warmup_fraction")
