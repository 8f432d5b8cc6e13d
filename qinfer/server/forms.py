"""The form that an answer must have, checked before the engine hears of the request.

A grammar is compiled here, on a thread of its own, so that a bad one is a 400 whose `param` is the field that
the client knows: the engine only knows the kind of grammar that came of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams
from qinfer.server.errors import ApiError
from qinfer.server.protocol import GenerationRequest
from qinfer.server.state import ServerState
from qinfer.structured_outputs import KINDS


@contextmanager
def blamed_on(request: GenerationRequest) -> Iterator[None]:
    """Turns a UserError about a grammar into an ApiError about the request's field."""
    try:
        yield
    except UserError as error:
        if error.parameter not in KINDS:
            raise
        raise ApiError(400, str(error), request.field_of_form(error.parameter)) from None


def compile_form(state: ServerState, request: GenerationRequest, params: SamplingParams) -> None:
    """ApiError where the grammar that binds the answer cannot be compiled."""
    if params.structured_outputs is not None:
        with blamed_on(request):
            state.engine.compile(params.structured_outputs)
