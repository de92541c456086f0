"""Mistakes in the kernels."""

from __future__ import annotations

from mutant_tables.mutant import Mutant

KERNELS = (
    Mutant(
        name="kernels: the rounds of Philox keep their first key",
        file="kernels/electra_kernels/keyed_random.py",
        original="        key1 = (key1 + _KEY_INCREMENT1) & _MASK32\n",
        mutated="",
        test="tests/kernels/test_keyed_random.py::test_philox_gives_the_published_answers_in_numpy_and_torch",
    ),
    Mutant(
        name="kernels: kept elements are not scaled up by dropout",
        file="kernels/electra_kernels/keyed_random.py",
        original="scale = 1.0 / (1.0 - drop)",
        mutated="scale = 1.0",
        test="tests/kernels/test_dropout_add_norm.py::"
        "test_the_dropout_probability_is_the_share_dropped_and_sets_the_factor_of_the_others",
    ),
    Mutant(
        name="kernels: two sites of a layer drop the same elements",
        file="kernels/electra_kernels/layer_passes.py",
        original="first_position=site * elements_per_row,",
        mutated="first_position=0,",
        test="tests/kernels/test_dropout_add_norm.py::"
        "test_a_row_drops_the_same_elements_in_any_batch_and_other_elements_at_another_site_step_or_seed",
    ),
    Mutant(
        name="kernels: logits are multiplied by the temperature",
        file="kernels/electra_kernels/sampling.py",
        original="score_MV += logits_MV * (1.0 / temperature)",
        mutated="score_MV += logits_MV * temperature",
        test="tests/kernels/test_sampling.py::test_samples_are_those_of_a_float64_sampler_where_the_best_score_is_clear",
    ),
    Mutant(
        name="kernels: noise of the highest random words is that of 1",
        file="kernels/electra_kernels/sampling.py",
        original="one_minus_u = (_MAX_BITS - bits).float().add_(0.5).mul_(2.0**-32)",
        mutated="one_minus_u = 1.0 - u",
        test="tests/kernels/test_sampling.py::"
        "test_noise_of_the_lowest_and_highest_random_words_is_finite_decreasing_and_exact",
    ),
    Mutant(
        name="kernels: a token that is sampled anew is labelled although it is the original",
        file="kernels/electra_kernels/slots.py",
        original="return corrupted_BS, corrupted_BS != ids_BS",
        mutated="return corrupted_BS, count_BS > 0",
        test="tests/kernels/test_replace_tokens.py::"
        "test_used_slots_replace_their_tokens_and_only_tokens_that_differ_are_labelled",
    ),
    Mutant(
        name="kernels: unused slots replace the first token of a row",
        file="kernels/electra_kernels/slots.py",
        original="is_written_BN = (weight_BN > 0).to(ids_BS.dtype)",
        mutated="is_written_BN = (weight_BN >= 0).to(ids_BS.dtype)",
        test="tests/kernels/test_replace_tokens.py::"
        "test_used_slots_replace_their_tokens_and_only_tokens_that_differ_are_labelled",
    ),
    Mutant(
        name="kernels: gradients of slots that share a position overwrite one another",
        file="kernels/electra_kernels/slots.py",
        original="sums.index_add_(0,",
        mutated="sums.index_copy_(0,",
        test="tests/kernels/test_masked_gather.py::"
        "test_gather_reads_each_slots_position_and_adds_the_gradients_of_slots_that_share_one",
    ),
    Mutant(
        name="kernels: tokens that do not count are found to be original",
        file="kernels/electra_kernels/discriminator_tail.py",
        original="original_T = (1 - label_T) * mask_T",
        mutated="original_T = 1 - label_T",
        test="tests/kernels/test_discriminator_tail.py::"
        "test_loss_logits_and_counts_are_those_of_binary_cross_entropy_over_real_tokens",
    ),
    Mutant(
        name="kernels: a row of weight 0 adds its infinite loss",
        file="kernels/electra_kernels/mlm_head.py",
        original="torch.where(weight_M > 0, loss_M * weight_M, 0).sum()",
        mutated="(loss_M * weight_M).sum()",
        test="tests/kernels/test_mlm_head.py::test_rows_of_weight_zero_have_no_loss_and_no_gradient_but_are_sampled",
    ),
    Mutant(
        name="kernels: the head's gradient of the bias is that of the last chunk",
        file="kernels/electra_kernels/mlm_head.py",
        original="grad_bias_V += grad_logits_MV.sum(0, dtype=sum_dtype)",
        mutated="grad_bias_V = grad_logits_MV.sum(0, dtype=sum_dtype)",
        test="tests/kernels/test_mlm_head.py::test_loss_and_gradients_are_those_of_float64_autograd_for_any_chunk",
    ),
    Mutant(
        name="kernels: masked tokens are hidden in all slots",
        file="kernels/electra_kernels/slots.py",
        original="shows_mask_BN = is_used_BN & (keep_bits_BN < shown)",
        mutated="shows_mask_BN = is_used_BN",
        test="tests/objectives/test_masking.py::test_masks_equal_those_of_the_numpy_mirror_bit_for_bit",
    ),
    Mutant(
        name="kernels: special tokens of a row are masked",
        file="kernels/electra_kernels/slots.py",
        original="candidate_BS = special.is_candidate(ids_BS)",
        mutated="candidate_BS = ids_BS != special.pad",
        test="tests/objectives/test_masking.py::test_only_ordinary_tokens_in_used_slots_are_masked",
    ),
)
