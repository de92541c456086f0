"""Divide a JSON file into its records: the elements of an array, the lines, or values that follow one another.

Guarantee: every record is yielded once, as the bytes that it has in the file. A file that is cut off within a record,
or that is no JSON, is an error.

How: if the first line is a whole object, the file is read line by line (such a `.json` file is JSON lines under
another name, as in C4). Otherwise Python's JSON parser finds the end of each value in a window of the text, which
grows until it holds a whole value.

Limits: a value of more than 256 MiB of text is an error, so that a broken value does not load the whole file.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator

from electra_dist.corpus.inputs.file_kinds import MOST_DOCUMENT_BYTES, READ_BYTES, lines_of

_REST_OF_NUMBER = re.compile(r"[0-9.eE+-]*")
_WHITE_SPACE = " \t\r\n"
# Control characters within strings are left to the reader of the record, which skips that record alone.
_PARSER = json.JSONDecoder(strict=False)


def read_json(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the records of a JSON file, undecoded; raise EOFError or OSError if it is cut off or not JSON.

    Records are the elements of an array, the lines, or values that follow one another.
    """
    first_part = stream.readline(MOST_DOCUMENT_BYTES)  # of a longer line it is the beginning
    while first_part and not first_part.strip():
        first_part = stream.readline(MOST_DOCUMENT_BYTES)
    if _is_object(first_part):
        yield first_part
        yield from lines_of(stream)
    elif first_part:
        yield from _values(_Window(first_part, stream))


def _is_object(line: bytes) -> bool:
    """Return whether a line is one whole JSON object, which means that the file is JSON lines."""
    try:
        return isinstance(json.loads(line.decode("utf-8-sig", "replace"), strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _values(window: _Window) -> Iterator[bytes]:
    """Yield the bytes of each JSON value in a file: the elements of an array, or values that follow one another."""
    in_array = window.next_character() == "["
    if in_array:
        window.skip_character()
    while character := window.next_character():
        if in_array and character == "]":
            window.skip_character()
            if window.next_character():
                raise OSError("there is text after the end of the JSON array")
            return
        if in_array and character == ",":
            window.skip_character()
        else:
            yield window.next_value().encode("utf-8", "surrogateescape")
    if in_array:
        raise EOFError("the JSON array is cut off")


class _Window:
    """Window on a JSON text that is read piece by piece: the text in memory, and the position of the parser in it.

    Bytes that are not UTF-8 become surrogates, which can be turned back into the same bytes.
    """

    def __init__(self, first_part: bytes, stream: io.BufferedIOBase) -> None:
        """Begin at `first_part`, which was read already; `stream` has the rest of the file."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = self._decoder.decode(first_part)
        self._position = 0

    def next_character(self) -> str:
        """Move to the next character that is not white space, and return that character; "" at the end of the file."""
        while True:
            while self._position < len(self._text):
                character = self._text[self._position]
                if character not in _WHITE_SPACE:
                    return character
                self._position += 1
            if not self._read_more():
                return ""

    def skip_character(self) -> None:
        self._position += 1

    def next_value(self) -> str:
        """Return the text of the JSON value at the position, and move past it; raise OSError if there is no value."""
        while True:
            try:
                _, end = _PARSER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if not self._read_more():
                    raise OSError(
                        f"no complete JSON value: {error.msg}; a file of one JSON object a line is read line by line "
                        "if its name ends in .jsonl"
                    ) from None
                continue
            except RecursionError:
                raise OSError("a JSON value is nested too deeply") from None
            except ValueError:  # Python converts no number of more than 4,300 digits
                raise OSError("a number in a JSON value has too many digits") from None
            # A number may go on after the end of the window, which may be within it, as in "0." for 0.
            is_closed = self._text[end - 1] in '}]"'
            if not is_closed and _REST_OF_NUMBER.fullmatch(self._text, end) and self._read_more():
                continue
            value = self._text[self._position : end]
            self._position = end
            return value

    def _read_more(self) -> bool:
        """Forget the text before the position, and read on; return False at the end of the file.

        Doubling the window keeps the time linear in the size of a value.
        """
        self._text = self._text[self._position :]
        self._position = 0
        if len(self._text) > MOST_DOCUMENT_BYTES:
            raise OSError(f"no complete JSON value within {MOST_DOCUMENT_BYTES >> 20} MiB")
        data = self._stream.read(max(READ_BYTES, len(self._text)))
        self._text += self._decoder.decode(data, final=not data)
        return bool(data)
