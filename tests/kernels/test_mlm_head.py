"""The head's loss, gradients and samples against float64 autograd, for any chunk and any split of the rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from electra_kernels import mlm_head
from electra_kernels.gumbel_noise import gumbel_from_bits
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.mlm_head import MlmHeadOutput, mlm_head_loss_and_sample, row_pass_reference
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import RowOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB, PADDED, WIDTH = 90, 128, 12


def inputs(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x_MD": torch.randn(num_rows, WIDTH, generator=generator).to(dtype).requires_grad_(),
        "weight_VD": torch.randn(PADDED, WIDTH, generator=generator).to(dtype).requires_grad_(),
        "bias_V": torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_(),
        "target_M": torch.randint(VOCAB, (num_rows,), generator=generator),
        "weight_M": (torch.rand(num_rows, generator=generator) > 0.3).float(),
        "row_M": torch.arange(num_rows) + 1000,
    }


def head(given: dict, **more: object) -> MlmHeadOutput:
    return mlm_head_loss_and_sample(**given, **({"seed": 11, "step": 2, "vocab_size": VOCAB} | more))


def eager_loss(given: dict) -> torch.Tensor:
    x, weight, bias = (given[name].double() for name in ("x_MD", "weight_VD", "bias_V"))
    logits = x @ weight[:VOCAB].t() + bias
    return (F.cross_entropy(logits, given["target_M"], reduction="none") * given["weight_M"]).sum()


@pytest.mark.parametrize("chunk", [4096, 7, 1])
def test_loss_and_gradients_are_autograds(chunk):
    given = inputs(23)
    parameters = [given[name] for name in ("x_MD", "weight_VD", "bias_V")]
    out = head(given, chunk=chunk)
    exact = eager_loss(given)
    assert out.loss_sum.dtype == torch.float32
    assert out.loss_sum.item() == pytest.approx(exact.item(), rel=1e-6)
    ours = torch.autograd.grad(0.37 * out.loss_sum, parameters)
    truth = torch.autograd.grad(0.37 * exact, parameters)
    for a, b in zip(ours, truth):
        assert (a - b).abs().max() < 2e-6
    assert not ours[1][VOCAB:].any()


def test_statistics():
    given = inputs(400)
    out = head(given)
    best = (given["x_MD"] @ given["weight_VD"][:VOCAB].t() + given["bias_V"]).argmax(1)
    weight, target = given["weight_M"], given["target_M"]
    assert out.weight_sum.item() == float(weight.sum())
    assert out.correct_sum.item() == float(weight[best == target].sum())
    assert out.sampled_correct_sum.item() == float(weight[out.sampled_M == target].sum()) > 0
    assert not out.sampled_M.requires_grad


def test_gradcheck_in_float64_with_the_table_tied_to_the_features():
    vocab, padded = 17, 24
    target = torch.randint(vocab, (6,))
    fixed = {"target_M": target, "weight_M": torch.rand(6).double(), "row_M": torch.arange(6)}

    def tied(table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        features = table[target.flip(0)] * 0.5  # the table's other use: an embedding
        given = {"x_MD": features, "weight_VD": table, "bias_V": bias, **fixed}
        return head(given, chunk=4, vocab_size=vocab).loss_sum

    table = torch.randn(padded, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tied, (table, bias))


@given(
    num_rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    cut=st.integers(0, 40),
    temperature=st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_samples_ignore_chunk_and_split(num_rows, chunk, cut, temperature):
    given = inputs(num_rows, seed=num_rows)
    whole = head(given, temperature=temperature).sampled_M
    assert torch.equal(head(given, temperature=temperature, chunk=chunk).sampled_M, whole)
    shared = {name: given[name] for name in ("weight_VD", "bias_V")}
    parts = [
        head({**{k: v[s] for k, v in given.items() if k not in shared}, **shared}, temperature=temperature).sampled_M
        for s in (slice(0, min(cut, num_rows)), slice(min(cut, num_rows), num_rows))
        if s.stop > s.start
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_samples_are_those_of_the_public_sampler(exact_sample):
    given = inputs(500)
    drawn = head(given).sampled_M
    logits = (given["x_MD"] @ given["weight_VD"][:VOCAB].t() + given["bias_V"]).detach()
    expected, gap = exact_sample(logits.numpy(), 11, 2, given["row_M"].numpy())
    clear = torch.from_numpy(gap > 1e-4)
    assert torch.equal(drawn[clear], torch.from_numpy(expected)[clear])


def test_gradient_mode_does_not_change_values():
    given = inputs(50)
    trained, evaluated = head(given), None
    with torch.no_grad():
        evaluated = head(given)
    assert not evaluated.loss_sum.requires_grad
    for a, b in zip(trained, evaluated):
        assert torch.equal(a.detach(), b)


def test_all_weights_zero_is_a_zero_loss_with_zero_gradients():
    given = inputs(9)
    given["weight_M"] = torch.zeros(9)
    given["bias_V"] = torch.full((VOCAB,), -math.inf).index_fill(0, torch.tensor([3]), 0.0).requires_grad_()
    out = head(given)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    assert not given["x_MD"].grad.any()
    assert not given["weight_VD"].grad.any()
    assert (out.sampled_M == 3).all()


def test_disallow_correct_never_draws_the_target():
    given = inputs(600)
    # A bias that makes the target nearly certain.
    given["target_M"] = torch.full((600,), 7)
    given["bias_V"] = torch.zeros(VOCAB).index_fill(0, torch.tensor([7]), 30.0)
    assert (head(given).sampled_M == 7).float().mean() > 0.9
    assert not (head(given, disallow_correct=True).sampled_M == 7).any()


def test_confident_rows_keep_their_gradient_in_bf16():
    given = inputs(8, torch.bfloat16)
    given["target_M"] = torch.full((8,), 7)
    given["weight_M"] = torch.ones(8)
    given["bias_V"] = torch.zeros(VOCAB).index_fill(0, torch.tensor([7]), 26.0).requires_grad_()
    out = head(given)
    grad = torch.autograd.grad(out.loss_sum, given["bias_V"])[0]
    truth = torch.autograd.grad(eager_loss(given), given["bias_V"])[0]
    assert float(truth[7]) < 0
    assert float(grad[7]) == pytest.approx(float(truth[7]), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_get_gradients_of_their_own_type(dtype):
    given = inputs(40, dtype)
    out = head(given)
    parameters = [given[name] for name in ("x_MD", "weight_VD", "bias_V")]
    ours = torch.autograd.grad(out.loss_sum, parameters)
    exact = eager_loss(given)
    truth = torch.autograd.grad(exact, parameters)
    assert out.loss_sum.item() == pytest.approx(exact.item(), rel=1e-6)
    for a, b in zip(ours, truth):
        assert a.dtype == dtype
        assert (a.double() - b.double()).abs().max() <= torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.skipif(cpu_library.row_pass is None, reason="the package was built without a C compiler")
@pytest.mark.parametrize("vocab", [2, 16, 33, 1000])
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(
    ("spread", "temperature", "disallow"), [(1.0, 1.0, False), (30.0, 0.5, False), (3.0, 2.0, True)]
)
def test_the_librarys_row_pass_is_the_definition(vocab, with_gradient, spread, temperature, disallow, monkeypatch):
    generator, rows = torch.Generator().manual_seed(vocab), 50
    logits = spread * torch.randn(rows, vocab + 5, generator=generator)
    bias = torch.randn(vocab, generator=generator)
    bias[-1] = -torch.inf
    target = torch.randint(max(1, vocab - 1), (rows,), generator=generator)
    weight, row = torch.rand(rows, generator=generator), torch.randint(2**32, (rows,), generator=generator)
    options = RowOptions(2**62 + 3, 2**32 - 1, vocab, temperature, disallow and vocab > 2, with_gradient)
    by_library, exact = logits.clone(), logits.double()
    ours = row_pass_reference(by_library, bias, target, weight, row, options)
    monkeypatch.setattr(cpu_library, "row_pass", None)
    truth = row_pass_reference(exact, bias.double(), target, weight.double(), row, options)
    torch.testing.assert_close(ours.loss_M.double(), truth.loss_M, rtol=1e-6, atol=2e-6 * spread)
    assert torch.equal(ours.best_M, truth.best_M)
    if with_gradient:
        torch.testing.assert_close(by_library.double(), exact, rtol=0, atol=2e-6)
    else:
        assert torch.equal(by_library, logits)
    noise = gumbel_from_bits(bits_grid(options.seed, Purpose.SAMPLE, options.step, row, vocab)).double()
    score = (logits[:, :vocab] + bias).double() / temperature + noise
    if options.disallow_correct:
        score.scatter_(1, target[:, None], -torch.inf)
    lost = score.max(1).values - score.gather(1, ours.sampled_M[:, None])[:, 0]
    assert lost.max() < 1e-4  # another token is drawn only where two are as good as equal
    assert (ours.sampled_M == truth.sampled_M).all()


@pytest.mark.skipif(cpu_library.row_pass is None, reason="the package was built without a C compiler")
def test_a_logit_that_is_no_number_makes_a_loss_that_is_none():
    for poison in (math.nan, math.inf):
        logits, one = torch.zeros(2, 40), torch.ones(2)
        logits[1, 7] = poison
        options = RowOptions(1, 2, 40, 1.0, False, True)
        found = row_pass_reference(logits, torch.zeros(40), torch.tensor([3, 3]), one, torch.arange(2), options)
        assert found.loss_M[0].item() == pytest.approx(math.log(40))
        assert math.isnan(found.loss_M[1])
        assert ((found.sampled_M >= 0) & (found.sampled_M < 40)).all()


class ProductRecorder(TorchDispatchMode):
    """Records the dtypes of the operands of every matrix product."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "mm" in operator.overloadpacket.__name__:
            tensors = [operand for operand in args if isinstance(operand, torch.Tensor)]
            self.dtypes.update(factor.dtype for factor in tensors[-2:])
        return operator(*args, **(kwargs or {}))


def test_under_autocast_on_a_gpu_the_products_are_those_of_bf16_weights(monkeypatch):
    # Tensors on "meta" stand for those of a GPU, whose autocast a machine without one cannot enter.
    monkeypatch.setattr(mlm_head, "_can_add_low_precision_products", lambda device, dtype: True)
    dtypes = {}
    grads = {}
    for weight_dtype, autocast in [(torch.float32, True), (torch.bfloat16, False), (torch.float32, False)]:
        given = {name: tensor.detach().to("meta") for name, tensor in inputs(20, weight_dtype).items()}
        given["weight_VD"].requires_grad_()
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda _=None, answer=autocast: answer)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
        with ProductRecorder() as recorder:
            head(given, backend="reference").loss_sum.backward()
        dtypes[weight_dtype, autocast] = recorder.dtypes
        grads[weight_dtype, autocast] = given["weight_VD"].grad.dtype
    assert dtypes[torch.float32, True] == dtypes[torch.bfloat16, False] == {torch.bfloat16}
    assert dtypes[torch.float32, False] == {torch.float32}
    assert grads[torch.float32, True] == torch.float32
