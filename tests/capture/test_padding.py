"""Where padding is read: innermost module first, by name, and refused where nobody can tell."""

from typing import Any

import pytest
import torch
from torch import nn

from loopscope.capture.masks import MaskError
from loopscope.capture.padding import PaddingReader
from loopscope.trace import TracePoint

B, S = 3, 6
VALID = torch.arange(S) < torch.tensor([[S], [4], [1]])
IDS = (torch.arange(1, 1 + B * S).reshape(B, S)) * VALID


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x


class Stack(nn.Module):
    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList([Layer(), Layer()]), calls

    def forward(self, x: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x, **kwargs)
        return x


class Decoder(nn.Module):
    """Lets a test say what each level is given."""

    def __init__(self, inside: Any = lambda given: given, calls: int = 1) -> None:
        super().__init__()
        self.model, self.inside = Stack(calls), inside

    def forward(self, ids: torch.Tensor, batch: Any = None, **kwargs: Any) -> torch.Tensor:
        return self.model(torch.zeros(*ids.shape, 4), **self.inside(kwargs))


def read(model: nn.Module, *args: Any, lengths: dict[str, int] | None = None, **kwargs: Any) -> Any:
    """What the reader finds for the layers of `model`, called so."""
    reader = PaddingReader()
    modules = dict(model.named_modules())
    blocks = [name for name, module in modules.items() if isinstance(module, Layer)]
    called: list[str] = []
    for name in blocks:
        modules[name].register_forward_hook(lambda m, a, o, name=name: called.append(name))
    with reader.listening(modules, blocks):
        model(*args, **kwargs)
    points = [
        TracePoint(
            block="tail", unrolled_pos=place, loop_step=0, layer_idx=0, num_experts=0, top_k=0, router_logits=None,
            router_probs=None, topk_idx=None, topk_weights=None,
            residual=torch.zeros(B, (lengths or {}).get(name.split(".")[0], S), 4),
        )
        for place, name in enumerate(called)
    ]  # fmt: skip
    return reader.valid(model, args, kwargs, points, called)


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": VALID.long()}, {"key_padding_mask": ~VALID}, {"src_key_padding_mask": ~VALID},
        {"key_padding_mask": torch.where(VALID, 0.0, -torch.inf)}, {"padding_mask": ~VALID},
        {"batch": {"attention_mask": VALID}}, {"attention_mask": VALID, "loss_mask": ~VALID},
    ],
    ids=lambda given: "+".join(given),
)  # fmt: skip
def test_names_with_their_polarity(given: dict[str, Any]) -> None:
    assert torch.equal(read(Decoder(), IDS, **given), VALID)


def test_a_mask_by_position() -> None:
    class Positional(Decoder):
        def forward(self, ids: torch.Tensor, attention_mask: Any) -> torch.Tensor:
            return self.model(torch.zeros(*ids.shape, 4))

    assert torch.equal(read(Positional(), IDS, VALID), VALID)


def test_the_innermost_mask_that_fits() -> None:
    """A prompt of two virtual tokens is put before the ids; the model inside is told of it."""
    prompt = torch.cat([torch.ones(B, 2, dtype=torch.bool), VALID], 1)
    model = Decoder(lambda given: {"attention_mask": prompt})
    assert torch.equal(read(model, IDS, lengths={"model": S + 2}, attention_mask=VALID), prompt)
    # Where the model inside is given something that says nothing, what is around it does.
    model = Decoder(lambda given: {"mask": torch.ones(S, S).tril().bool()}, calls=3)
    assert torch.equal(read(model, IDS, attention_mask=VALID), VALID)


def test_a_mask_that_only_the_blocks_are_given() -> None:
    model = Decoder(lambda given: {"key_padding_mask": ~VALID})
    assert torch.equal(read(model, IDS), VALID)


def test_an_encoder_and_a_decoder_have_a_mask_each() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Stack(), Stack()

        def forward(
            self, input_ids: Any, attention_mask: Any = None, decoder_attention_mask: Any = None
        ) -> torch.Tensor:
            self.encoder(torch.zeros(B, S, 4))
            return self.decoder(torch.zeros(B, 4, 4), encoder_attention_mask=attention_mask)

    decoder = torch.arange(4) < torch.tensor([[3], [4], [2]])
    lengths = {"encoder": S, "decoder": 4}
    found = read(Pair(), IDS, lengths=lengths, attention_mask=VALID, decoder_attention_mask=decoder)
    assert [torch.equal(found[place], VALID) for place in (0, 1)] == [True, True]
    assert [torch.equal(found[place], decoder) for place in (2, 3)] == [True, True]
    found = read(Pair(), IDS, lengths=lengths, attention_mask=VALID)
    assert torch.equal(found[0], VALID)
    assert found[2] is None


@pytest.mark.parametrize(
    "given",
    [
        {"mask": VALID}, {"pad_mask": ~VALID}, {"attn_mask": VALID[:, None, None].expand(B, 1, S, S)},
        {"padding_mask": VALID}, {"attention_mask": VALID[:, 1:]}, {"attention_mask": "causal"},
    ],
    ids=["mask", "pad_mask", "attn_mask 4d", "padding_mask the other way round", "another shape", "text"],
)  # fmt: skip
def test_what_could_be_padding_is_refused(given: dict[str, Any]) -> None:
    ids = torch.arange(B * S).reshape(B, S)  # no two are the same
    with pytest.raises(MaskError, match="valid="):
        read(Decoder(), ids, **given)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"mask": torch.ones(S, S).tril().bool()}, {"attn_mask": ~torch.ones(S, S).tril().bool()},
        {"mask": torch.ones(B, S)}, {"mask": torch.zeros(B, 1, S, S)}, {"loss_mask": VALID}, {"head_mask": None},
        {"mask": torch.ones(2, 3)},
    ],
)  # fmt: skip
def test_what_says_nothing_of_padding(given: dict[str, Any]) -> None:
    assert read(Decoder(), IDS, **given) is None


def test_packed_sequences() -> None:
    found = read(Decoder(), IDS, cu_seqlens=torch.tensor([0, 5, 16]))
    assert int(found.sum()) == 16
