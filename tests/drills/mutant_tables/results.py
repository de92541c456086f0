"""Mistakes in what follows pretraining: exports, fine-tuning, comparisons, plans, reports, analyses."""

from __future__ import annotations

from mutant_tables.mutant import Mutant

RESULTS = (
    Mutant(
        name="pretrained: the exported weights are not those of the checkpoint",
        file="electra_dist/pretrained/weights.py",
        original="weights=chosen.weights,",
        mutated="weights={name: tensor * 1.001 for name, tensor in chosen.weights.items()},",
        test="tests/pretrained/test_finished_run.py::test_exported_model_is_the_trained_one",
    ),
    Mutant(
        name="pretrained: keys and values change places in an export",
        file="electra_dist/pretrained/hf.py",
        original="zip(their_names, parts, strict=True)",
        mutated="zip(their_names, (parts[0], *parts[:0:-1]), strict=True)",
        test="tests/pretrained/test_hf.py::test_an_exported_discriminator_has_the_states_and_logits_of_the_tower",
    ),
    Mutant(
        name="pretrained: an export has the rows that pad the vocabulary",
        file="electra_dist/pretrained/hf.py",
        original="ours[_TABLE] = ours[_TABLE][: model.vocab_size]",
        mutated="pass",
        test="tests/pretrained/test_hf.py::"
        "test_exported_files_have_the_architecture_and_sizes_of_the_model_and_fp32_weights",
    ),
    Mutant(
        name="pretrained: a table stored as a difference is exported as it is",
        file="electra_dist/pretrained/hf.py",
        original="weights[name] = weights[name] + weights[own_name]",
        mutated="weights[name] = weights[own_name]",
        test="tests/model/test_sharing.py::test_exported_towers_answer_alike",
    ),
    Mutant(
        name="pretrained: a folder with too few positions is accepted",
        file="electra_dist/pretrained/hf_folders.py",
        original="isinstance(num_positions, int) and num_positions < model.max_positions",
        mutated="isinstance(num_positions, int) and num_positions < 1",
        test="tests/pretrained/test_load_towers.py::test_a_folder_of_another_shape_is_refused_with_the_difference",
    ),
    Mutant(
        name="pretrained: weights with another digest than the config's are taken",
        file="electra_dist/pretrained/weights.py",
        original="if expected_digest is not None and digest != expected_digest:",
        mutated='if expected_digest == "":',
        test="tests/pretrained/test_frozen_generator.py::"
        "test_weights_with_another_digest_than_the_config_sets_are_refused",
    ),
    Mutant(
        name="finetune: fine-tuning does not clip gradients",
        file="electra_dist/finetune/training_loop.py",
        original="torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm, foreach=True)",
        mutated="pass",
        test="tests/finetune/test_gradient_clipping.py::"
        "test_gradients_above_the_limit_are_scaled_down_to_it_and_others_are_not_changed",
    ),
    Mutant(
        name="finetune: the top layer has the learning rate of the head",
        file="electra_dist/finetune/training_loop.py",
        original="depth = layer_number + 1",
        mutated="depth = layer_number + 2",
        test="tests/finetune/test_layerwise_optimizer.py::"
        "test_every_parameter_has_the_learning_rate_of_its_depth_and_biases_and_norms_no_weight_decay",
    ),
    Mutant(
        name="finetune: the learning rate does not fall",
        file="electra_dist/finetune/training_loop.py",
        original="return warmup * (1.0 - step / num_steps)",
        mutated="return warmup",
        test="tests/finetune/test_layerwise_optimizer.py::"
        "test_the_schedule_is_the_product_of_warm_up_and_linear_decay_and_starts_at_zero",
    ),
    Mutant(
        name="finetune: every pass has the order of the first one",
        file="electra_dist/finetune/training_loop.py",
        original="derive_seed(seed, Purpose.ROW_ORDER, epoch)",
        mutated="derive_seed(seed, Purpose.ROW_ORDER, 0)",
        test="tests/finetune/test_training_loop.py::"
        "test_every_pass_sees_each_row_once_in_a_new_order_and_incomplete_batches_give_no_step",
    ),
    Mutant(
        name="finetune: an average of GLUE is that of the tasks that there are",
        file="electra_dist/finetune/scores.py",
        original="        if median is None:\n            return None\n",
        mutated="        if median is None:\n            continue\n",
        test="tests/finetune/test_scores.py",
    ),
    Mutant(
        name="finetune: an answer may be one token too long",
        file="electra_dist/finetune/squad_task.py",
        original="num_tokens <= max_answer",
        mutated="num_tokens <= max_answer + 1",
        test="tests/finetune/test_squad_task.py::"
        "test_a_span_is_an_answer_only_if_it_is_short_lies_in_the_passage_and_starts_at_an_owned_token",
    ),
    Mutant(
        name="finetune: F1 of an answer counts a repeated word as often as it is predicted",
        file="electra_dist/finetune/squad_task.py",
        original="num_common = (Counter(predicted_words) & Counter(gold_words)).total()",
        mutated="num_common = sum(word in gold_words for word in predicted_words)",
        test="tests/finetune/test_squad_metrics.py::test_exact_match_and_f1_of_one_answer_equal_the_values_by_hand",
    ),
    Mutant(
        name="finetune: SQuAD leaves out questions without a prediction",
        file="electra_dist/finetune/squad_task.py",
        original="return 100.0 * sum(scores) / len(gold)",
        mutated="return 100.0 * sum(scores) / len(scores)",
        test="tests/finetune/test_squad_metrics.py::"
        "test_squad_1_takes_the_best_gold_answer_and_counts_a_missing_prediction_as_wrong",
    ),
    Mutant(
        name="finetune: a token belongs to the window where it has least context",
        file="electra_dist/finetune/passage_windows.py",
        original="return max(containing, key=context)",
        mutated="return min(containing, key=context)",
        test="tests/finetune/test_passage_windows.py::"
        "test_each_token_is_owned_by_the_one_window_where_it_has_most_context",
    ),
    Mutant(
        name="finetune: a span of another type continues the one before",
        file="electra_dist/finetune/tagging_task.py",
        original="if prefix in _BEGIN or span_type != open_type:",
        mutated="if prefix in _BEGIN or not open_type:",
        test="tests/finetune/test_tagging.py::test_spans_of_tags_are_those_of_the_evaluation_of_conll",
    ),
    Mutant(
        name="finetune: multi-word tokens count as words of a treebank",
        file="electra_dist/finetune/word_files.py",
        original='is_syntactic_word = "-" not in columns[_ID] and "." not in columns[_ID]',
        mutated='is_syntactic_word = "." not in columns[_ID]',
        test="tests/finetune/test_word_probes.py::"
        "test_words_tags_and_heads_are_read_without_multiword_tokens_and_empty_nodes",
    ),
    Mutant(
        name="finetune: a predicted label of a regression is not scaled back",
        file="electra_dist/finetune/text_task.py",
        original="value_N = low + (high - low) * predicted_N.astype(np.float64)",
        mutated="value_N = predicted_N.astype(np.float64)",
        test="tests/finetune/test_text_task.py",
    ),
    Mutant(
        name="finetune: a tie counts as a right minimal pair",
        file="electra_dist/scoring/minimal_pairs.py",
        original="is_hit = (good_scores > bad_scores).tolist()",
        mutated="is_hit = (good_scores >= bad_scores).tolist()",
        test="tests/scoring/test_minimal_pairs.py::"
        "test_a_pair_is_right_if_the_ungrammatical_word_has_the_higher_logit_for_replaced_and_a_tie_is_wrong",
    ),
    Mutant(
        name="finetune: F1 of three labels is that of the first one",
        file="electra_dist/finetune/task_metrics.py",
        original='average = "binary" if num_labels == 2 else "macro"',
        mutated='average = "binary" if num_labels == 2 else "micro"',
        test="tests/finetune/test_task_metrics.py::test_f1_of_three_labels_is_the_mean_of_the_labels_f1",
    ),
    Mutant(
        name="finetune: the GLUE average is the median of its tasks",
        file="electra_dist/finetune/scores.py",
        original="return statistics.fmean(medians)",
        mutated="return statistics.median(medians)",
        test="tests/finetune/test_scores.py::"
        "test_the_glue_average_is_the_mean_of_eight_tasks_and_does_not_exist_for_fewer",
    ),
    Mutant(
        name="scoring: the worst candidate of a group comes first",
        file="electra_dist/scoring/text_scores.py",
        original="key=lambda index: (texts[index].group, -scores[index], index)",
        mutated="key=lambda index: (texts[index].group, scores[index], index)",
        test="tests/scoring/test_text_scores.py::test_re_ranking_sorts_each_group_by_score_and_keeps_the_order_of_ties",
    ),
    Mutant(
        name="scoring: the probability of a token's original is called that of its replacement",
        file="electra_dist/scoring/text_scores.py",
        original="(-torch.expm1(log_prob_S.double())).tolist()",
        mutated="torch.exp(log_prob_S.double()).tolist()",
        test="tests/scoring/test_text_scores.py::"
        "test_a_discriminator_gives_each_token_the_probability_that_hugging_faces_model_gives",
    ),
    Mutant(
        name="scoring: tokens at a border of windows are scored twice",
        file="electra_dist/scoring/text_scores.py",
        original="last = num_tokens if next_start is None else (next_start + end) // 2",
        mutated="last = num_tokens if next_start is None else end",
        test="tests/scoring/test_text_scores.py::test_windows_score_every_token_once_and_give_it_context_on_both_sides",
    ),
    Mutant(
        name="compare: a difference at the limit counts as passed",
        file="electra_dist/compare/significance.py",
        original="elif difference.mean > criterion.standard_errors * difference.standard_error:",
        mutated="elif difference.mean > 0.0:",
        test="tests/compare/test_criterion.py::"
        "test_a_criterion_is_met_by_differences_above_the_stated_number_of_standard_errors",
    ),
    Mutant(
        name="compare: the standard error of a mean is the deviation of one seed",
        file="electra_dist/compare/significance.py",
        original="statistics.stdev(gains) / math.sqrt(len(seeds))",
        mutated="statistics.stdev(gains)",
        test="tests/compare/test_criterion.py::test_the_difference_is_paired_by_seed_as_in_scipys_paired_t_test",
    ),
    Mutant(
        name="compare: the smaller of two standard errors counts",
        file="electra_dist/compare/significance.py",
        original="return max((error for error in (self.seed_error, self.test_error)",
        mutated="return min((error for error in (self.seed_error, self.test_error)",
        test="tests/compare/test_criterion.py::test_the_difference_is_paired_by_seed_as_in_scipys_paired_t_test",
    ),
    Mutant(
        name="compare: the error of a difference is that of different test examples",
        file="electra_dist/compare/significance.py",
        original="test_error=unpaired_error if paired_error is None else paired_error,",
        mutated="test_error=unpaired_error,",
        test="tests/compare/test_paired_errors.py::test_the_paired_error_of_one_kind_is_that_of_mcnemars_test",
    ),
    Mutant(
        name="scoring: only the next piece of a word is masked with the scored one",
        file="electra_dist/scoring/token_scores.py",
        original="copies.append([*row_ids[:position], *[mask] * (end - position), *row_ids[end:]])",
        mutated="copies.append([*row_ids[:position], mask, *row_ids[position + 1 :]])",
        test="tests/scoring/test_pair_files.py::"
        "test_the_rest_of_a_word_is_masked_with_the_scored_token_in_the_second_sum",
    ),
    Mutant(
        name="compare: a step that was repeated after a restart counts twice",
        file="electra_dist/compare/score_plot.py",
        original="values[record.step] = value",
        mutated="values[record.step + len(values)] = value",
        test="tests/compare/test_run_evaluations.py::test_curves_are_read_by_flops_and_a_repeated_step_counts_once",
    ),
    Mutant(
        name="compare: a shorter run has as many warm-up steps as the longer one",
        file="electra_dist/compare/comparison_plan.py",
        original='"optimizer.warmup_steps": round(warmup_share * num_steps),',
        mutated='"optimizer.warmup_steps": objective_config.optimizer.warmup_steps,',
        test="tests/compare/test_comparison_plan.py::"
        "test_every_run_has_the_flops_of_the_first_objective_up_to_half_a_step",
    ),
    Mutant(
        name="compare: the average of a seed is over the tasks that it has",
        file="electra_dist/compare/comparison_results.py",
        original="complete_seeds = set.intersection(*seeds_per_task)",
        mutated="complete_seeds = set.union(*seeds_per_task)",
        test="tests/compare/test_score_tables.py::"
        "test_a_row_has_the_median_and_spread_over_the_seeds_of_every_task_and_of_the_average",
    ),
    Mutant(
        name="planning: GPU hours are those of one GPU",
        file="electra_dist/planning/budget.py",
        original="gpu_hours=plan.num_gpus * tokens / tokens_per_s / 3600,",
        mutated="gpu_hours=tokens / tokens_per_s / 3600,",
        test="tests/planning/test_budget.py::test_tokens_flops_and_time_of_electra_large_equal_the_sums_by_hand",
    ),
    Mutant(
        name="planning: a bandwidth in bits is taken for one in bytes",
        file="electra_dist/planning/multi_node_scaling.py",
        original='units_per_byte = 8 if unit == "b" else 1',
        mutated="units_per_byte = 1",
        test="tests/planning/test_multi_node_scaling.py::"
        "test_a_bandwidth_is_read_in_bits_or_bytes_with_the_number_of_links",
    ),
    Mutant(
        name="planning: one rank sends its gradients",
        file="electra_dist/planning/multi_node_scaling.py",
        original="return num_elements * element_size * (ranks - 1) / ranks",
        mutated="return num_elements * element_size",
        test="tests/planning/test_multi_node_scaling.py::"
        "test_one_rank_sends_nothing_and_many_ranks_send_almost_every_element",
    ),
    Mutant(
        name="planning: the paper's FLOPs leave out the backward pass",
        file="electra_dist/planning/paper_flops.py",
        original="return 2 * (self.profiled + forward_per_row * self.rows)",
        mutated="return self.profiled + forward_per_row * self.rows",
        test="tests/planning/test_paper_flops.py::"
        "test_flops_by_the_papers_method_equal_those_of_its_script_and_of_its_table",
    ),
    Mutant(
        name="planning: the price of a thousand requests is that of one",
        file="electra_dist/corpus/plan/corpus_plan.py",
        original="self.requests.total / 1000 * prices.thousand_requests",
        mutated="self.requests.total * prices.thousand_requests",
        test="tests/corpus/plan/test_corpus_plan.py::test_the_cost_is_that_of_hours_requests_and_bytes",
    ),
    Mutant(
        name="planning: more machines divide the merge of a corpus",
        file="electra_dist/corpus/plan/corpus_plan.py",
        original="return shared / (self.num_machines * self.cores_per_machine) + self.merge.core_hours",
        mutated="return shared / (self.num_machines * self.cores_per_machine) + self.merge.core_hours / "
        "self.num_machines",
        test="tests/corpus/plan/test_corpus_plan.py::test_more_machines_divide_the_parallel_steps_and_not_the_merge",
    ),
    Mutant(
        name="report: a thinned curve loses its lowest points",
        file="electra_dist/report/curve_points.py",
        original="        selected.add(int(bucket_indices[bucket_values.argmin()]))\n",
        mutated="",
        test="tests/report/test_report_page.py::"
        "test_a_thinned_curve_has_points_of_the_curve_in_order_with_its_ends_and_extremes",
    ),
    Mutant(
        name="report: a smoothed curve lags behind the values",
        file="electra_dist/report/curve_points.py",
        original="return (mean_from_left + mean_from_right) / 2",
        mutated="return mean_from_left",
        test="tests/report/test_report_page.py::test_smoothing_leaves_a_constant_as_it_is_and_does_not_lag_behind_a_line",
    ),
    Mutant(
        name="report: names of runs are written into the page as HTML",
        file="electra_dist/report/templates/parts.html",
        original=">{{ cell }}</td>",
        mutated=">{{ cell|safe }}</td>",
        test="tests/corpus/stats/test_stats_page.py::test_the_page_needs_no_other_file_and_escapes_names",
    ),
    Mutant(
        name="report: two runs of one name are shown under it",
        file="electra_dist/report/overlay_page.py",
        original="    for num_parts in range(1, longest + 1):",
        mutated="    for num_parts in range(1, 2):",
        test="tests/report/test_overlay_page.py::test_runs_of_equal_name_are_told_apart_by_their_folders",
    ),
    Mutant(
        name="report: the command of cluster.notify is shown with its secrets",
        file="electra_dist/report/run_record.py",
        original="= without_secrets(read_yaml(file))",
        mutated="= read_yaml(file)",
        test="tests/report/test_report_page.py::test_the_report_can_be_passed_on",
    ),
    Mutant(
        name="tracking: services receive the command of cluster.notify",
        file="electra_dist/config/secrets.py",
        original="return HIDDEN if tree else tree",
        mutated="return tree",
        test="tests/report/test_report_page.py::test_the_report_can_be_passed_on",
    ),
    Mutant(
        name="tracking: a run that has failed is finished for the service",
        file="electra_dist/report/tracking.py",
        original="        self._has_failed = has_failed\n",
        mutated="",
        test="tests/report/test_background_tracker.py::"
        "test_a_service_receives_all_values_in_order_and_how_the_run_ended",
    ),
    Mutant(
        name="tracking: an error of a service ends its thread unseen",
        file="electra_dist/report/tracking.py",
        original="            self._drop(_one_line(error))\n",
        mutated="            pass\n",
        test="tests/report/test_background_tracker.py::test_a_service_that_fails_is_dropped_with_one_line",
    ),
    Mutant(
        name="tracking: a second start begins a new run at MLflow",
        file="electra_dist/report/tracking.py",
        original='_remember_id(run_dir, "mlflow", self._run_id)',
        mutated="pass",
        test="tests/report/test_services.py::test_mlflow_has_the_settings_and_the_values_of_all_starts_in_one_run",
    ),
    Mutant(
        name="analysis: ties count as won in the AUC",
        file="electra_dist/train/roc_auc.py",
        original="negatives_below + 0.5 * negatives_per_group",
        mutated="negatives_below + negatives_per_group",
        test="tests/train/test_roc_auc.py::"
        "test_auc_is_the_share_of_pairs_that_are_ranked_right_with_ties_counted_half",
    ),
    Mutant(
        name="analysis: precision is the share of the replaced tokens",
        file="electra_dist/train/roc_auc.py",
        original="precision=num_true_positive / max(1, num_predicted),",
        mutated="precision=num_true_positive / max(1, num_positive),",
        test="tests/train/test_roc_auc.py::test_all_measures_equal_those_of_scikit_learn",
    ),
    Mutant(
        name="analysis: the standard error of the context AUC takes rows for independent tokens",
        file="electra_dist/train/roc_auc.py",
        original="clusters_present, cluster_index = np.unique(clusters, return_inverse=True)",
        mutated="clusters_present, cluster_index = np.unique(np.arange(len(clusters)), return_inverse=True)",
        test="tests/run/test_context_auc.py::test_rows_that_move_together_widen_the_standard_error",
    ),
    Mutant(
        name="analysis: a rank that is done counts as hung",
        file="electra_dist/run/heartbeat.py",
        original='        if beat.phase == "done":\n            return float("inf")\n',
        mutated="",
        test="tests/run/test_hung_ranks.py::test_a_rank_that_is_done_is_never_hung",
    ),
    Mutant(
        name="analysis: a stuck rank is excused by ranks that are ahead of it",
        file="electra_dist/run/heartbeat.py",
        original="other.step <= beat.step",
        mutated="other.step >= beat.step",
        test="tests/run/test_hung_ranks.py::test_a_stuck_rank_is_not_excused_by_ranks_that_are_ahead_of_it_or_done",
    ),
    Mutant(
        name="analysis: Young's interval lacks its factor of two",
        file="electra_dist/train/checkpointer.py",
        original="math.sqrt(2.0 * stall_s * interruption_s)",
        mutated="math.sqrt(stall_s * interruption_s)",
        test="tests/train/test_save_interval.py::"
        "test_the_interval_of_young_and_daly_loses_less_time_than_shorter_and_longer_ones",
    ),
    Mutant(
        name="analysis: a stop on purpose counts as an interruption",
        file="electra_dist/train/checkpointer.py",
        original='sum(start.ended_by in ("crash", "unhealthy", None) for start',
        mutated="sum(True for start",
        test="tests/train/test_save_interval.py::test_the_time_between_interruptions_starts_from_a_guess_of_one_day",
    ),
    Mutant(
        name="analysis: goodput counts the time in the queue",
        file="electra_dist/run/goodput.py",
        original="outside_queue_s = self.wall - self.queue",
        mutated="outside_queue_s = self.wall",
        test="tests/run/test_goodput.py::test_every_second_of_a_simulated_run_is_attributed_to_its_true_activity",
    ),
    Mutant(
        name="analysis: repeated steps count as useful",
        file="electra_dist/run/goodput.py",
        original="useful_s += num_kept * step_s",
        mutated="useful_s += start.num_steps * step_s",
        test="tests/run/test_goodput.py::test_every_second_of_a_simulated_run_is_attributed_to_its_true_activity",
    ),
    Mutant(
        name="analysis: energy is that of the first node",
        file="electra_dist/report/run_record.py",
        original="return self.mean_power_w * self.num_nodes * self.seconds / 3.6e6",
        mutated="return self.mean_power_w * self.seconds / 3.6e6",
        test="tests/report/test_energy.py::"
        "test_energy_is_the_power_weighted_by_time_over_the_life_of_the_processes_on_all_nodes",
    ),
    Mutant(
        name="analysis: a run that ended for lack of storage is dead",
        file="electra_dist/run/history.py",
        original='if ending in ("stop", "storage"):',
        mutated='if ending in ("stop",):',
        test="tests/launcher/cli/test_status.py::test_a_run_that_ended_for_lack_of_storage_is_stopped_with_the_reason",
    ),
    Mutant(
        name="analysis: one slow look makes a straggler",
        file="electra_dist/train/monitor.py",
        original="    if len(last_looks) < in_a_row:\n        return []\n",
        mutated="    last_looks = looks[-1:]\n",
        test="tests/train/test_rank_monitor.py::"
        "test_a_rank_is_a_straggler_only_if_it_was_slow_in_each_of_the_last_looks",
    ),
    Mutant(
        name="analysis: the rows of skipped steps are expected in the receipts",
        file="electra_dist/data/row_audit.py",
        original="if skipped_step < step:",
        mutated="if skipped_step > step:",
        test="tests/data/test_row_audit.py::test_one_wrong_row_is_found_between_the_marks_around_it_and_named",
    ),
    Mutant(
        name="analysis: a logit of zero predicts a replaced token",
        file="electra_dist/train/roc_auc.py",
        original="np.asarray(logits, dtype=np.float64) > 0",
        mutated="np.asarray(logits, dtype=np.float64) >= 0",
        test="tests/train/test_roc_auc.py::test_a_logit_of_exactly_zero_predicts_an_original_token",
    ),
    Mutant(
        name="speed: norms of layers are counted as operators of the optimizer",
        file="electra_dist/train/step_operators.py",
        original='"optimizer": r"_foreach|Adam|Lamb|multi_tensor|clip|linalg_vector_norm"',
        mutated='"optimizer": r"_foreach|Adam|Lamb|multi_tensor|clip|norm"',
        test="tests/train/test_operator_kinds.py::test_an_operator_is_counted_for_its_part_of_the_step",
    ),
    Mutant(
        name="speed: a product has its slowest time",
        file="electra_dist/train/step_operators.py",
        original="total_s += count * min(times)",
        mutated="total_s += count * max(times)",
        test="tests/train/test_product_ceiling.py::test_each_product_counts_as_often_as_it_occurs_with_its_fastest_time",
    ),
)
