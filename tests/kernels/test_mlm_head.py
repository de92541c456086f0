"""The head's loss, gradients and samples against float64 autograd, for any chunk and any split of the rows."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from electra_kernels import products
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.mlm_head import MlmHeadOutput, gumbel_from_bits, mlm_head_loss_and_sample, row_pass_reference
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import RowOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from support.torch_versions import needs_products_on_meta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

VOCAB = 90
PADDED = 128  # rows of the table; those from VOCAB on are padding
WIDTH = 12
PARAMETERS = ("x_MD", "weight_VD", "bias_V")  # the arguments of the head that get gradients


def inputs(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
    """Random arguments of the head for `num_rows` masked tokens, by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x_MD": torch.randn(num_rows, WIDTH, generator=generator).to(dtype).requires_grad_(),
        "weight_VD": torch.randn(PADDED, WIDTH, generator=generator).to(dtype).requires_grad_(),
        "bias_V": torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_(),
        "target_M": torch.randint(VOCAB, (num_rows,), generator=generator),
        "weight_M": (torch.rand(num_rows, generator=generator) > 0.3).float(),
        "row_M": torch.arange(num_rows) + 1000,
    }


def head(arguments: dict, **options: object) -> MlmHeadOutput:
    """The head's output with seed 11 in step 2, unless `options` override them."""
    defaults = {"seed": 11, "step": 2, "vocab_size": VOCAB}
    return mlm_head_loss_and_sample(**arguments, **{**defaults, **options})


def logits_of(arguments: dict) -> torch.Tensor:
    """Logits of the tokens that exist, [M, V], in the dtype of the arguments."""
    x_MD, weight_VD, bias_V = (arguments[name] for name in PARAMETERS)
    return x_MD @ weight_VD[:VOCAB].t() + bias_V


def float64_loss(arguments: dict) -> torch.Tensor:
    """The weighted sum of cross entropies, computed by plain PyTorch in float64."""
    logits = logits_of({name: arguments[name].double() for name in PARAMETERS})
    return (F.cross_entropy(logits, arguments["target_M"], reduction="none") * arguments["weight_M"]).sum()


def bias_towards(token: int, bias: float) -> torch.Tensor:
    """A bias vector, [V], that is 0 except at one token."""
    return torch.zeros(VOCAB).index_fill(0, torch.tensor([token]), bias)


@pytest.mark.parametrize("chunk", [4096, 7, 1])
def test_loss_and_gradients_are_those_of_float64_autograd_for_any_chunk(chunk):
    arguments = inputs(23)
    parameters = [arguments[name] for name in PARAMETERS]
    upstream = 0.37

    out = head(arguments, chunk=chunk)
    gradients = torch.autograd.grad(upstream * out.loss_sum, parameters)

    exact_loss = float64_loss(arguments)
    exact_gradients = torch.autograd.grad(upstream * exact_loss, parameters)
    assert out.loss_sum.dtype == torch.float32
    assert out.loss_sum.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    for gradient, exact_gradient in zip(gradients, exact_gradients):
        assert (gradient - exact_gradient).abs().max() < 2e-6
    table_gradient = gradients[1]
    assert not table_gradient[VOCAB:].any()


def test_counts_are_the_weights_of_correct_predictions_and_samples():
    arguments = inputs(400)
    weight, target = arguments["weight_M"], arguments["target_M"]

    out = head(arguments)

    most_likely = logits_of(arguments).argmax(1)
    assert out.weight_sum.item() == float(weight.sum())
    assert out.correct_sum.item() == float(weight[most_likely == target].sum())
    assert out.sampled_correct_sum.item() == float(weight[out.sampled_M == target].sum())
    assert out.sampled_correct_sum.item() > 0
    assert not out.sampled_M.requires_grad


def test_gradients_pass_gradcheck_when_the_features_come_from_the_heads_own_table():
    """In ELECTRA the head's table is also the word embedding, so its gradient has two sources."""
    vocab, padded = 17, 24
    target = torch.randint(vocab, (6,))
    fixed = {"target_M": target, "weight_M": torch.rand(6).double(), "row_M": torch.arange(6)}

    def tied_loss(table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        features = table[target.flip(0)] * 0.5  # an embedding by the same table
        arguments = {"x_MD": features, "weight_VD": table, "bias_V": bias, **fixed}
        return head(arguments, chunk=4, vocab_size=vocab).loss_sum

    table = torch.randn(padded, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True)
    # gradcheck runs several backward passes through one graph; each of them computes the head's gradients anew.
    anew = functools.partial(checkpoint, tied_loss, use_reentrant=False)
    assert torch.autograd.gradcheck(anew, (table, bias))


@given(
    num_rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    cut=st.integers(0, 40),
    temperature=st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_a_rows_sample_depends_neither_on_the_chunk_nor_on_the_other_rows(num_rows, chunk, cut, temperature):
    arguments = inputs(num_rows, seed=num_rows)
    table_and_bias = {name: arguments[name] for name in ("weight_VD", "bias_V")}
    per_row = {name: tensor for name, tensor in arguments.items() if name not in table_and_bias}
    cut = min(cut, num_rows)

    whole = head(arguments, temperature=temperature).sampled_M
    in_chunks = head(arguments, temperature=temperature, chunk=chunk).sampled_M
    parts = []
    for part in (slice(0, cut), slice(cut, num_rows)):
        if part.start == part.stop:
            continue
        part_of_rows = {name: tensor[part] for name, tensor in per_row.items()}
        parts.append(head({**part_of_rows, **table_and_bias}, temperature=temperature).sampled_M)

    assert torch.equal(in_chunks, whole)
    assert torch.equal(torch.cat(parts), whole)


def test_samples_are_those_of_a_float64_sampler_where_the_best_score_is_clear(exact_sample):
    """Scores closer than 1e-4 may be ordered differently in fp32."""
    arguments = inputs(500)

    sampled = head(arguments).sampled_M

    logits = logits_of(arguments).detach().numpy()
    expected, gap = exact_sample(logits, 11, 2, arguments["row_M"].numpy())
    is_clear = torch.from_numpy(gap > 1e-4)
    assert torch.equal(sampled[is_clear], torch.from_numpy(expected)[is_clear])


def test_no_grad_changes_no_value():
    arguments = inputs(50)

    with_gradient = head(arguments)
    with torch.no_grad():
        without_gradient = head(arguments)

    assert not without_gradient.loss_sum.requires_grad
    for tensor, tensor_without_gradient in zip(with_gradient, without_gradient):
        assert torch.equal(tensor.detach(), tensor_without_gradient)


def test_rows_of_weight_zero_have_no_loss_and_no_gradient_but_are_sampled():
    """Token 3 is the only one with a finite logit, so it is every row's sample and most rows' loss is infinite."""
    only_token = 3
    arguments = inputs(9)
    arguments["weight_M"] = torch.zeros(9)
    forbidding_bias = torch.full((VOCAB,), -math.inf).index_fill(0, torch.tensor([only_token]), 0.0)
    arguments["bias_V"] = forbidding_bias.requires_grad_()

    out = head(arguments)
    out.loss_sum.backward()

    assert out.loss_sum.item() == 0.0
    assert not arguments["x_MD"].grad.any()
    assert not arguments["weight_VD"].grad.any()
    assert (out.sampled_M == only_token).all()


def test_disallow_correct_never_draws_the_target_even_where_it_is_nearly_certain():
    target = 7
    arguments = inputs(600)
    arguments["target_M"] = torch.full((600,), target)
    arguments["bias_V"] = bias_towards(target, 30.0)

    allowed = head(arguments).sampled_M
    disallowed = head(arguments, disallow_correct=True).sampled_M

    assert (allowed == target).float().mean() > 0.9
    assert not (disallowed == target).any()


def test_in_bf16_rows_that_predict_their_target_with_near_certainty_keep_their_gradient():
    """softmax - 1 at the target is tiny; a softmax rounded to bf16 before the subtraction would give 0."""
    target = 7
    arguments = inputs(8, torch.bfloat16)
    arguments["target_M"] = torch.full((8,), target)
    arguments["weight_M"] = torch.ones(8)
    arguments["bias_V"] = bias_towards(target, 26.0).requires_grad_()

    gradient = torch.autograd.grad(head(arguments).loss_sum, arguments["bias_V"])[0]
    exact_gradient = torch.autograd.grad(float64_loss(arguments), arguments["bias_V"])[0]

    assert float(exact_gradient[target]) < 0
    assert float(gradient[target]) == pytest.approx(float(exact_gradient[target]), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_get_gradients_of_their_own_type_within_its_rounding(dtype):
    arguments = inputs(40, dtype)
    parameters = [arguments[name] for name in PARAMETERS]

    out = head(arguments)
    gradients = torch.autograd.grad(out.loss_sum, parameters)

    exact_loss = float64_loss(arguments)
    exact_gradients = torch.autograd.grad(exact_loss, parameters)
    assert out.loss_sum.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    for gradient, exact_gradient in zip(gradients, exact_gradients):
        assert gradient.dtype == dtype
        error = (gradient.double() - exact_gradient.double()).abs().max()
        assert error <= torch.finfo(dtype).eps * exact_gradient.abs().max()


@pytest.mark.skipif(cpu_library.row_pass is None, reason="the package was built without a C compiler")
@pytest.mark.parametrize("vocab", [2, 16, 33, 1000])
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(
    ("spread", "temperature", "disallow"), [(1.0, 1.0, False), (30.0, 0.5, False), (3.0, 2.0, True)]
)
def test_the_c_librarys_row_pass_is_the_definition_in_float64(
    vocab, with_gradient, spread, temperature, disallow, monkeypatch
):
    """The definition is the same function without the library. Seed, step and rows use their whole ranges."""
    num_rows = 50
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(num_rows, vocab + 5, generator=generator)  # 5 columns of padding
    bias = torch.randn(vocab, generator=generator)
    bias[-1] = -torch.inf
    target = torch.randint(max(1, vocab - 1), (num_rows,), generator=generator)
    weight = torch.rand(num_rows, generator=generator)
    row = torch.randint(2**32, (num_rows,), generator=generator)
    options = RowOptions(
        seed=2**62 + 3,
        step=2**32 - 1,
        vocab_size=vocab,
        temperature=temperature,
        disallow_correct=disallow and vocab > 2,
        with_gradient=with_gradient,
    )

    overwritten_logits = logits.clone()  # the gradient replaces the logits in place
    stats = row_pass_reference(overwritten_logits, bias, target, weight, row, options)
    monkeypatch.setattr(cpu_library, "row_pass", None)
    exact_overwritten_logits = logits.double()
    exact_stats = row_pass_reference(exact_overwritten_logits, bias.double(), target, weight.double(), row, options)

    torch.testing.assert_close(stats.loss_M.double(), exact_stats.loss_M, rtol=1e-6, atol=2e-6 * spread)
    assert torch.equal(stats.best_M, exact_stats.best_M)
    if with_gradient:
        torch.testing.assert_close(overwritten_logits.double(), exact_overwritten_logits, rtol=0, atol=2e-6)
    else:
        assert torch.equal(overwritten_logits, logits)

    noise = gumbel_from_bits(bits_grid(options.seed, Purpose.SAMPLE, options.step, row, vocab)).double()
    score = (logits[:, :vocab] + bias).double() / temperature + noise
    if options.disallow_correct:
        score.scatter_(1, target[:, None], -torch.inf)
    score_of_sample = score.gather(1, stats.sampled_M[:, None])[:, 0]
    lost_score = score.max(1).values - score_of_sample
    assert lost_score.max() < 1e-4  # another token is drawn only where two scores are as good as equal
    assert (stats.sampled_M == exact_stats.sampled_M).all()


@pytest.mark.skipif(cpu_library.row_pass is None, reason="the package was built without a C compiler")
def test_a_nan_or_infinite_logit_makes_the_loss_of_its_row_nan_and_leaves_the_other_rows_alone():
    vocab = 40
    options = RowOptions(seed=1, step=2, vocab_size=vocab, temperature=1.0, disallow_correct=False, with_gradient=True)
    for bad_value in (math.nan, math.inf):
        logits = torch.zeros(2, vocab)
        logits[1, 7] = bad_value

        stats = row_pass_reference(
            logits, torch.zeros(vocab), torch.tensor([3, 3]), torch.ones(2), torch.arange(2), options
        )

        loss_of_good_row, loss_of_bad_row = stats.loss_M
        assert loss_of_good_row.item() == pytest.approx(math.log(vocab))
        assert math.isnan(loss_of_bad_row)
        assert (stats.sampled_M >= 0).all()
        assert (stats.sampled_M < vocab).all()


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


@needs_products_on_meta
def test_under_autocast_on_a_gpu_the_products_are_those_of_bf16_weights(monkeypatch):
    # Tensors on "meta" stand for those of a GPU, whose autocast a machine without one cannot enter.
    monkeypatch.setattr(products, "_adds_low_precision_products", lambda device, dtype: True)
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


def test_backward_allocates_no_second_gradient_of_the_table():
    """The gradients that forward has computed are scaled in place; the values are those of float64 autograd."""
    arguments = inputs(9)
    loss = head(arguments).loss_sum * 3.0
    allocated: list[torch.Size] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and all(result is not argument for argument in args):
                allocated.append(result.shape)
            return result

    parameters = [arguments[name] for name in PARAMETERS]
    with Recorder():
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert (PADDED, WIDTH) not in allocated
    expected = torch.autograd.grad(float64_loss(arguments) * 3.0, parameters)
    for gradient, right in zip(found, expected):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, parameters)
