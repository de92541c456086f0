"""All kinds of the golden set."""

from __future__ import annotations

from golden import batches, corpora, errors, exports, identities, json_outputs, scripts, training

KINDS = {
    module.KIND.name: module.KIND
    for module in (identities, scripts, errors, batches, corpora, json_outputs, exports, training)
}
