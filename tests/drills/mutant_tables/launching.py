"""Mistakes in what starts runs: Slurm jobs, supervisors, preflight, chaos, commands."""

from __future__ import annotations

from mutant_tables.mutant import Mutant

LAUNCHING = (
    Mutant(
        name="slurm: a mistake in the config has the job requeued",
        file="launcher/electra_launcher/slurm/job.py",
        original='return JobVerdict(action="stop", exit_code=EXIT_USER_ERROR, why=why)',
        mutated='return JobVerdict(action="again", exit_code=EXIT_USER_ERROR, why=why)',
        test="tests/launcher/slurm/test_job.py::test_each_kind_of_end_has_its_action_and_exit_code",
    ),
    Mutant(
        name="slurm: a run without progress is started once more than allowed",
        file="launcher/electra_launcher/slurm/job.py",
        original="if num_fruitless > max_fruitless_restarts:",
        mutated="if num_fruitless > max_fruitless_restarts + 1:",
        test="tests/launcher/slurm/test_job.py::test_three_restarts_without_a_new_checkpoint_end_the_run",
    ),
    Mutant(
        name="slurm: an earlier job's stop decides for this one",
        file="launcher/electra_launcher/slurm/job.py",
        original="events = ledger[newest.begin.ledger_events :]",
        mutated="events = ledger",
        test="tests/launcher/slurm/test_job.py::test_a_stop_of_an_earlier_job_does_not_hide_a_crash_of_this_one",
    ),
    Mutant(
        name="slurm: TERM at the time limit is taken for a cancellation",
        file="launcher/electra_launcher/slurm/job.py",
        original="now < limit - _CANCELLED_BEFORE_S",
        mutated="now < limit + _CANCELLED_BEFORE_S",
        test="tests/launcher/slurm/test_job.py::"
        "test_a_jump_of_the_wall_clock_during_a_job_makes_neither_a_cancellation_of_its_time_limit_nor_the_reverse",
    ),
    Mutant(
        name="slurm: the job's bookkeeping ends with 0 after a mistake in the config",
        file="launcher/electra_launcher/entry.py",
        original="return code_if_away if isinstance(error, StoreAway) else EXIT_USER_ERROR",
        mutated="return code_if_away if isinstance(error, StoreAway) else 0",
        test="tests/launcher/slurm/test_job.py::test_a_job_whose_config_names_another_run_folder_is_refused",
    ),
    Mutant(
        name="slurm: a stop on purpose is a failure in the accounting",
        file="launcher/electra_launcher/slurm/job.sh",
        original='[ "$code" != 75 ] || code=0 # A stop',
        mutated='[ "$code" != 69 ] || code=0 # A stop',
        test="tests/launcher/slurm/test_job_script.py::"
        "test_a_stop_on_purpose_is_no_failure_in_the_accounting_and_everything_else_is",
    ),
    Mutant(
        name="slurm: a finished run leaves its waiting jobs in the queue",
        file="launcher/electra_launcher/slurm/job.sh",
        original='done | stop) for job in $(pending); do retry scancel "$job"; done ;;',
        mutated="done | stop) ;;",
        test="tests/launcher/slurm/test_job_script.py::test_a_finished_run_cancels_the_jobs_that_wait",
    ),
    Mutant(
        name="slurm: a value with a backslash is written into an #SBATCH line",
        file="electra_dist/corpus/prepare/slurm_submission.py",
        original=r'if "\\" in text or not text.isprintable():',
        mutated="if not text.isprintable():",
        test="tests/launcher/slurm/test_batch_script.py::test_a_value_that_an_sbatch_line_cannot_carry_is_refused",
    ),
    Mutant(
        name="slurm: blanks in the path of the script break it",
        file="launcher/electra_launcher/slurm/batch_script.py",
        original='*(f"{name}={shlex.quote(text)}" for name, text in texts.items()),',
        mutated='*(f"{name}={text}" for name, text in texts.items()),',
        test="tests/launcher/slurm/test_batch_script.py::"
        "test_bash_reads_every_quoted_value_of_the_settings_back_exactly",
    ),
    Mutant(
        name="slurm: the shell of a node does not pass on a signal",
        file="launcher/electra_launcher/slurm/job.sh",
        original="trap 'pass_to_supervisor USR2' USR2",
        mutated="trap ':' USR2",
        test="tests/launcher/slurm/test_batch_script.py::test_a_signal_to_the_nodes_shell_alone_reaches_the_supervisor",
    ),
    Mutant(
        name="slurm: a node whose reason has a separator is left out",
        file="launcher/electra_launcher/slurm/slurm.py",
        original='fields = line.split("|", 2)',
        mutated='fields = line.split("|")',
        test="tests/launcher/slurm/test_slurm.py::"
        "test_parsing_finds_held_jobs_and_lists_each_unused_node_once_with_its_reason",
    ),
    Mutant(
        name="slurm: two runs of a sweep share a folder",
        file="launcher/electra_launcher/slurm/submit.py",
        original="if len(set(folders)) < len(folders):",
        mutated="if len(folders) < 1:",
        test="tests/launcher/slurm/test_submit.py::"
        "test_a_sweep_whose_runs_would_share_a_folder_or_have_no_values_is_refused",
    ),
    Mutant(
        name="slurm: hours of a time limit are read as minutes",
        file="launcher/electra_launcher/slurm/submit.py",
        original="return 86400 * int(days) + 3600 * hours + 60 * minutes + seconds",
        mutated="return 86400 * int(days) + 60 * hours + minutes + seconds",
        test="tests/launcher/cli/test_submit.py::test_a_time_limit_that_leaves_no_time_for_steps_is_refused",
    ),
    Mutant(
        name="slurm: a changed environment keeps its archive",
        file="launcher/electra_launcher/slurm/submit.py",
        original=r'f"{packed.name}\0{status.st_size}\0{status.st_mtime_ns}\0"',
        mutated=r'f"{packed.name}\0"',
        test="tests/launcher/slurm/test_environment_archive.py::"
        "test_a_changed_environment_has_another_archive_and_an_equal_one_is_not_packed_again",
    ),
    Mutant(
        name="slurm: a corpus is merged although a part has failed",
        file="launcher/electra_launcher/slurm/corpus_jobs.py",
        original="--dependency=afterok:",
        mutated="--dependency=afterany:",
        test="tests/launcher/slurm/test_corpus_jobs.py::test_each_job_needs_the_success_of_the_one_before",
    ),
    Mutant(
        name="slurm: a held job is not told from one that waits",
        file="launcher/electra_launcher/slurm/slurm.py",
        original='re.search("held|hold", self.reason, re.IGNORECASE) is not None',
        mutated='re.fullmatch("held|hold", self.reason, re.IGNORECASE) is not None',
        test="tests/launcher/slurm/test_slurm.py::"
        "test_parsing_finds_held_jobs_and_lists_each_unused_node_once_with_its_reason",
    ),
    Mutant(
        name="slurm: quotes and blanks in the run folder break the script",
        file="launcher/electra_launcher/slurm/batch_script.py",
        original='"run_dir": submission.config.run_dir,',
        mutated='"run_dir": submission.config.run_dir.replace(" ", ""),',
        test="tests/launcher/slurm/test_batch_script.py::"
        "test_a_run_folder_with_blanks_and_quotes_is_one_word_of_the_shell",
    ),
    Mutant(
        name="slurm: a checkpoint that is saved again counts as progress",
        file="electra_dist/run/history.py",
        original="for num_events, event in enumerate(ledger, start=1):",
        mutated="for num_events, event in reversed([*enumerate(ledger, start=1)]):",
        test="tests/launcher/slurm/test_job.py::test_restarts_within_a_job_count_as_failed_starts",
    ),
    Mutant(
        name="slurm: a job whose reason has a separator is left out",
        file="launcher/electra_launcher/slurm/slurm.py",
        original='line.split("|", 3)',
        mutated='line.split("|")',
        test="tests/launcher/slurm/test_slurm.py::"
        "test_the_reason_of_a_job_may_hold_the_separator_and_a_line_of_another_form_is_ignored",
    ),
    Mutant(
        name="supervise: lost storage counts as a crash",
        file="launcher/electra_launcher/supervise/start_outcome.py",
        original='if "storage" in newest_events:',
        mutated='if "storage_lost" in newest_events:',
        test="tests/launcher/supervise/test_start_outcome.py::"
        "test_exit_code_follows_from_the_ledger_and_the_ranks_exit_codes",
    ),
    Mutant(
        name="supervise: a healthy node is blamed for another one's fault",
        file="launcher/electra_launcher/supervise/start_outcome.py",
        original="if EXIT_UNHEALTHY in codes and end.at_fault:",
        mutated="if EXIT_UNHEALTHY in codes:",
        test="tests/launcher/supervise/test_start_outcome.py::"
        "test_exit_code_follows_from_the_ledger_and_the_ranks_exit_codes",
    ),
    Mutant(
        name="supervise: the ledger is awaited although a rank was killed",
        file="launcher/electra_launcher/supervise/start_outcome.py",
        original="all_have_ended = len(end.codes) == end.num_ranks",
        mutated="all_have_ended = True",
        test="tests/launcher/supervise/test_start_outcome.py::"
        "test_the_ledger_is_awaited_only_if_all_ranks_ended_with_0_or_75",
    ),
    Mutant(
        name="supervise: a heartbeat is dated by the wall clock of its node",
        file="launcher/electra_launcher/supervise/silence.py",
        original="dated = dataclasses.replace(beat, time=now, phase_since=phase_since)",
        mutated="dated = beat",
        test="tests/launcher/supervise/test_silence.py::"
        "test_a_heartbeat_is_dated_by_the_look_that_first_finds_it_whatever_the_wall_clocks_do",
    ),
    Mutant(
        name="supervise: every node notifies of the end of a run",
        file="launcher/electra_launcher/supervise/supervisor.py",
        original="if node != 0 and code != EXIT_UNHEALTHY:",
        mutated="if node < 0:",
        test="tests/launcher/supervise/test_notify.py::test_node_0_notifies_of_the_run_and_every_node_of_itself",
    ),
    Mutant(
        name="supervise: children of a notification that hangs live on",
        file="launcher/electra_launcher/supervise/supervisor.py",
        original="os.killpg(process.pid, signal.SIGKILL)",
        mutated="process.kill()",
        test="tests/launcher/supervise/test_notify.py::test_a_command_that_hangs_is_killed_with_its_children",
    ),
    Mutant(
        name="supervise: the ranks of all nodes have the same numbers",
        file="launcher/electra_launcher/supervise/rank_placement.py",
        original="first_rank = self.node * self.ranks_per_node",
        mutated="first_rank = 0",
        test="tests/launcher/supervise/test_rank_placement.py::"
        "test_the_variables_of_a_rank_name_its_place_and_the_port_of_this_start",
    ),
    Mutant(
        name="supervise: a folder that does not respond explains silence for ever",
        file="launcher/electra_launcher/supervise/silence.py",
        original="return now - self._away_since < self._patience_s",
        mutated="return True",
        test="tests/launcher/supervise/test_silence.py::"
        "test_a_folder_that_hangs_explains_silence_until_the_patience_ends",
    ),
    Mutant(
        name="supervise: a superseded job takes the run back",
        file="launcher/electra_launcher/supervise/rendezvous.py",
        original='return "" if newest == self._session else newest',
        mutated='return ""',
        test="tests/launcher/supervise/test_rendezvous.py::"
        "test_a_superseded_job_learns_the_name_of_the_job_that_has_taken_over",
    ),
    Mutant(
        name="supervise: two consecutive starts have the same port",
        file="launcher/electra_launcher/supervise/rendezvous.py",
        original="self._next_port(self._port, number)",
        mutated="self._port",
        test="tests/launcher/supervise/test_rendezvous.py::"
        "test_two_consecutive_starts_have_different_ports_also_if_no_port_is_free",
    ),
    Mutant(
        name="supervise: equal stacks of threads are shown again and again",
        file="launcher/electra_launcher/supervise/rank_processes.py",
        original="for calls, num_threads in Counter(calls_of_threads).items():",
        mutated="for calls, num_threads in [(calls, 1) for calls in calls_of_threads]:",
        test="tests/launcher/supervise/test_rank_processes.py::"
        "test_condensed_stacks_begin_with_the_main_thread_and_show_equal_stacks_once",
    ),
    Mutant(
        name="preflight: a fault of another node is this node's",
        file="launcher/electra_launcher/preflight/findings.py",
        original="severities_of_node = {finding.severity for finding in findings if finding.node == node}",
        mutated="severities_of_node = {finding.severity for finding in findings}",
        test="tests/launcher/preflight/test_findings.py::"
        "test_the_exit_code_counts_findings_of_this_node_and_a_user_error_takes_precedence",
    ),
    Mutant(
        name="preflight: a warning gives the node a strike",
        file="launcher/electra_launcher/preflight/findings.py",
        original='if finding.node == node and finding.severity == "unhealthy"]',
        mutated="if finding.node == node]",
        test="tests/launcher/preflight/test_findings.py::"
        "test_a_node_gets_one_strike_for_all_its_faults_and_none_for_warnings_or_faults_of_no_node",
    ),
    Mutant(
        name="preflight: the fastest GPU is called slow",
        file="launcher/electra_launcher/preflight/gpu_checks.py",
        original="if speed.tflops * factor < median]",
        mutated="if speed.tflops > median * factor]",
        test="tests/launcher/preflight/test_gpu_checks.py::"
        "test_a_device_is_slow_only_beyond_the_factor_and_its_node_is_not_reported_as_ok",
    ),
    Mutant(
        name="preflight: a GPU whose neighbours have more links is healthy",
        file="launcher/electra_launcher/preflight/gpu_checks.py",
        original="if num_active < most_links:",
        mutated="if num_active == 0 < most_links:",
        test="tests/launcher/preflight/test_gpu_checks.py::"
        "test_a_fault_of_one_gpu_is_named_with_its_next_step_and_the_other_gpu_is_ok",
    ),
    Mutant(
        name="preflight: a slow rank without GPUs makes its node unhealthy",
        file="launcher/electra_launcher/preflight/rank_checks.py",
        original='severity: Severity = "unhealthy" if on_gpu else "warning"',
        mutated='severity: Severity = "unhealthy"',
        test="tests/launcher/preflight/test_rank_checks.py::"
        "test_a_slow_rank_without_gpus_is_a_warning_and_without_measurements_no_rank_is_slow",
    ),
    Mutant(
        name="preflight: a product of matrices counts multiplications only",
        file="launcher/electra_launcher/preflight/rank_checks.py",
        original="flops_of_chunk = _CHUNK * 2 * size**3",
        mutated="flops_of_chunk = _CHUNK * size**3",
        test="tests/launcher/preflight/test_rank_measurements.py::"
        "test_the_speed_of_a_product_is_its_operations_divided_by_its_time",
    ),
    Mutant(
        name="preflight: in the last turn of a ring the ends do not meet",
        file="launcher/electra_launcher/preflight/rank_checks.py",
        original="pair_of_turn_2 = {0: last, last: 0} if is_odd else {}",
        mutated="pair_of_turn_2 = {}",
        test="tests/launcher/preflight/test_rank_measurements.py::"
        "test_in_the_ring_every_rank_is_paired_with_both_neighbours_once_and_pairs_are_mutual",
    ),
    Mutant(
        name="preflight: the checkpoint that is being written needs no space",
        file="launcher/electra_launcher/preflight/storage_checks.py",
        original="num_being_written = 1",
        mutated="num_being_written = 0",
        test="tests/launcher/preflight/test_disk_space_checks.py::"
        "test_checkpoints_need_twelve_bytes_per_parameter_for_each_one_kept_and_the_one_being_written",
    ),
    Mutant(
        name="preflight: the clock of a node may be an hour off",
        file="launcher/electra_launcher/preflight/storage_checks.py",
        original="SKEW_UNHEALTHY_S = 60.0",
        mutated="SKEW_UNHEALTHY_S = 3600.0 * 24",
        test="tests/launcher/preflight/test_storage_access_checks.py::"
        "test_a_clock_two_seconds_off_is_a_warning_and_a_minute_is_unhealthy",
    ),
    Mutant(
        name="preflight: ranks are compared with the fastest one",
        file="launcher/electra_launcher/preflight/rank_checks.py",
        original="median = statistics.median(seconds_by_rank.values())",
        mutated="median = min(seconds_by_rank.values())",
        test="tests/launcher/preflight/test_rank_checks.py::"
        "test_a_rank_is_slow_in_comparison_with_the_median_and_not_with_the_fastest_rank",
    ),
    Mutant(
        name="preflight: a clock may be ten minutes off",
        file="launcher/electra_launcher/preflight/storage_checks.py",
        original="SKEW_UNHEALTHY_S = 60.0",
        mutated="SKEW_UNHEALTHY_S = 600.0",
        test="tests/launcher/preflight/test_storage_access_checks.py::"
        "test_a_clock_two_seconds_off_is_a_warning_and_a_minute_is_unhealthy",
    ),
    Mutant(
        name="chaos: a damaged byte keeps its value",
        file="launcher/electra_launcher/chaos/faults.py",
        original="data[offset] ^= draw.randrange(1, 256)",
        mutated="data[offset] ^= draw.randrange(0, 1)",
        test="tests/launcher/chaos/test_chaos.py::test_damage_hits_exactly_one_file_of_the_newest_committed_checkpoint",
    ),
    Mutant(
        name="chaos: two faults may hit between the same checkpoints",
        file="launcher/electra_launcher/chaos/drill.py",
        original="step = number * window + draw.randrange(window - every_steps)",
        mutated="step = number * window + draw.randrange(2 * window)",
        test="tests/launcher/chaos/test_chaos.py::"
        "test_a_plan_has_every_kind_equally_often_and_a_checkpoint_between_any_two_faults",
    ),
    Mutant(
        name="chaos: the torn tail of a file is a whole line",
        file="launcher/electra_launcher/chaos/faults.py",
        original="size = draw.randrange(1, len(last_line))",
        mutated="size = 0",
        test="tests/launcher/chaos/test_chaos.py::test_a_torn_tail_is_the_beginning_of_a_line_after_all_whole_lines",
    ),
    Mutant(
        name="cli: an interrupted command ends with 1",
        file="launcher/electra_launcher/cli/main.py",
        original="raise typer.Exit(EXIT_STOPPED) from None",
        mutated="raise typer.Exit(1) from None",
        test="tests/launcher/cli/test_console.py::"
        "test_a_keyboard_interrupt_ends_every_program_with_75_and_without_a_traceback",
    ),
    Mutant(
        name="cli: verify ends with 0 although a checkpoint is damaged",
        file="launcher/electra_launcher/cli/checkpoint.py",
        original='            out.print(f"next: electra-dist checkpoint repair {path}")\n'
        "        raise typer.Exit(EXIT_CRASH)",
        mutated='            out.print(f"next: electra-dist checkpoint repair {path}")',
        test="tests/launcher/cli/test_checkpoint.py::test_verify_reads_every_checkpoint_and_names_the_damaged_one",
    ),
    Mutant(
        name="cli: verify --bytes compares sizes only",
        file="launcher/electra_launcher/cli/verify_bytes.py",
        original="if size_bytes == entry.bytes and sha256 == entry.sha256:",
        mutated="if size_bytes == entry.bytes:",
        test="tests/launcher/cli/test_verify_bytes.py::test_every_bad_file_is_named",
    ),
    Mutant(
        name="cli: the remaining time of a run is that of all its steps",
        file="launcher/electra_launcher/cli/run_facts.py",
        original="max(0, seen.config.train.num_steps - step)",
        mutated="seen.config.train.num_steps",
        test="tests/launcher/cli/test_status.py::"
        "test_a_running_job_is_shown_as_living_with_progress_checkpoint_job_and_goodput",
    ),
    Mutant(
        name="cli: score sorts the groups of candidates, too",
        file="launcher/electra_launcher/cli/models.py",
        original="for index, rank in ranks(all_lines, [text_score.score for text_score in scores]):",
        mutated="for rank, index in enumerate(sorted(range(len(scores)), key=lambda i: -scores[i].score), start=1):",
        test="tests/launcher/cli/test_score.py::test_re_ranking_sorts_the_candidates_of_each_group",
    ),
    Mutant(
        name="cli: status shows the ranks of older starts",
        file="launcher/electra_launcher/cli/run_facts.py",
        original="return [beat for beat in beats if beat.attempt == newest_attempt]",
        mutated="return [beat for beat in beats if beat.attempt <= newest_attempt]",
        test="tests/launcher/cli/test_status.py::test_ranks_of_an_earlier_start_are_neither_silent_nor_waiting",
    ),
    Mutant(
        name="launcher: a command whose reader has gone dies",
        file="launcher/electra_launcher/entry.py",
        original="        except (OSError, ValueError):\n            self._silence()\n\n    def _silence",
        mutated="        except ValueError:\n            self._silence()\n\n    def _silence",
        test="tests/launcher/test_entry.py::test_a_stream_is_silent_after_the_first_failed_write",
    ),
)
