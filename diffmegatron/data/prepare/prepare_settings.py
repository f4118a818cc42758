"""Settings of ``prepare``; this module avoids slow imports, so that ``--help`` stays fast."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

RecordLayout = Literal["text", "instruction", "chat", "template"]


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of a corpus that ``prepare`` writes: tokenizer, layout, fields and limits."""

    tokenizer: Annotated[
        str,
        typer.Option(
            help="cl100k_base (read from the folder DIFFMEGATRON_TIKTOKEN), bytes, a .tiktoken "
            "file, or a Hugging Face folder with tokenizer.json and tokenizer_config.json"
        ),
    ] = "cl100k_base"
    layout: Annotated[
        RecordLayout,
        typer.Option(
            help="text; or for fine-tuning, without loss on prompts: instruction, chat (ChatML), "
            "template (chat in the tokenizer's own template)"
        ),
    ] = "text"
    text_field: Annotated[str, typer.Option(help="JSON key or Parquet column of the text")] = "text"
    prompt_field: Annotated[str, typer.Option(help="Key of the prompt, for instruction")] = "prompt"
    response_field: Annotated[str, typer.Option(help="Key of the response, for instruction")] = (
        "response"
    )
    messages_field: Annotated[
        str, typer.Option(help="Key of the messages, for chat and template")
    ] = "messages"
    id_field: Annotated[
        str | None, typer.Option(help="Key that identifies a document in the rejects file")
    ] = None
    deduplicate: Annotated[
        bool,
        typer.Option("--deduplicate", help="Drop documents whose token ids equal an earlier one's"),
    ] = False
    max_document_bytes: Annotated[int, typer.Option(min=1, help="Reject longer documents")] = (
        1 << 26
    )
    max_reject_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Refuse the corpus if more documents are unusable"),
    ] = 0.05

    @property
    def field_settings(self) -> tuple[str, ...]:
        """Names of the settings that hold :attr:`required_fields`, e.g. ``("text_field",)``."""
        if self.layout == "instruction":
            return "prompt_field", "response_field"
        return ("text_field",) if self.layout == "text" else ("messages_field",)

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Names of the fields that every record must have in this layout."""
        return tuple(getattr(self, name) for name in self.field_settings)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns to read from a Parquet file."""
        return self.required_fields + ((self.id_field,) if self.id_field else ())

    def recorded(self) -> dict[str, Any]:
        """Return the settings for the manifest, without ``tokenizer`` and ``max_reject_share``."""
        # The manifest has the tokenizer's hash instead. max_reject_share does not change documents.
        values = asdict(self)
        del values["tokenizer"], values["max_reject_share"]
        return values
