"""Replace HTML pages by their main text, by trafilatura in a process of its own with a time limit.

Guarantee: a page becomes text or is counted with its reason: `no_text`, `timeout`, `crash` (the process died, as for
lack of memory) or `error`. The text depends on the page alone: the deduplication of trafilatura, which remembers
earlier pages, is off.

Limits: which pages exceed the time limit depends on the machine and its load. Only then may a repetition differ.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.extractors.base import ExtractorSandbox
from trafilatura import extract

from electra_dist.corpus.prepare.document_files import DropRecorder
from electra_dist.corpus.prepare.prepare_config import ExtractionSection
from electra_dist.corpus.prepare.read_sources import IS_HTML

_STEP = "extraction"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class ExtractText(PipelineStep):
    """Step that replaces HTML pages by their main text; documents that are text already pass unchanged."""

    name = "trafilatura"
    type = "EXTRACTOR"

    def __init__(self, settings: ExtractionSection, recorder: DropRecorder) -> None:
        """Store the settings. The process that extracts text starts with the first page."""
        super().__init__()
        self._settings = settings
        self._recorder = recorder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of `data` with HTML replaced by its text; drop and count pages that give no text."""
        with ExtractorSandbox(self._settings.timeout_s) as sandbox:
            for document in data:
                if not document.metadata.pop(IS_HTML, False):
                    yield document
                    continue
                text, reason = self._extract(sandbox, document.text)
                if reason is not None:
                    self._recorder.drop(_STEP, reason, document)
                    continue
                document.text = text
                yield document

    def _extract(self, sandbox: ExtractorSandbox, html: str) -> tuple[str, str | None]:
        """Return the main text of a page and None or, if the page is to be dropped, "" and the reason."""
        try:
            text = sandbox.process_document(html, self.extract)
        except TimeoutError:
            return "", "timeout"
        except EOFError:
            return "", "crash"
        if text is None:
            return "", "error"
        return (text, None) if text.strip() else ("", "no_text")

    def extract(self, html: str) -> str | None:
        """Return the main text of a page, "" if it has none; None if trafilatura fails. Runs in a child process.

        datatrove first calls this with an empty page. The child process then asks the kernel to kill it when its
        parent ends.
        """
        if not html:
            _die_with_parent()
            return ""
        try:
            text = extract(
                html,
                favor_precision=self._settings.favor == "precision",
                favor_recall=self._settings.favor == "recall",
                include_comments=False,
                deduplicate=False,
            )
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError, AssertionError):
            return None  # a fault of the extractor on a broken page; the page is counted
        return text or ""


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; this works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
