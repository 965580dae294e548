"""`larql run`: continue one prompt, or chat."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.cli.choose import (
    ACTIVATIONS_HELP,
    DEVICE_HELP,
    ENGINE_VARIABLE,
    FFN_HELP,
    RAW_VARIABLE,
    EngineChoice,
    check_ffn,
    choose_engine,
    choose_request,
    raw_wanted,
)
from larql_kv.cli.console import EXIT_INTERRUPTED, SlowNotice, note, print_json, warn, write

if TYPE_CHECKING:
    from larql_kv.cli.session import Session
    from larql_kv.engine import KvEngine
    from larql_kv.ffn.policy import FfnPolicy

PROMPT_TOKENS, CHAT_TOKENS = 64, 512


@dataclass
class Settings:
    """What the options of `larql run` say, checked."""

    max_tokens: int
    options: dict[str, Any]  # of engine.generate
    top: int
    verbose: bool
    began: float
    warnings: list[str] = field(default_factory=list)
    notice: SlowNotice = field(default_factory=SlowNotice)

    def show(self, text: str) -> None:
        """Model text to stdout."""
        self.notice.stop()
        write(text)

    def warn(self, text: str) -> None:
        """Say it on stderr now, and in the JSON object later."""
        self.warnings.append(text)
        warn(text)


def run_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A short name, a GGUF file, a Hugging Face directory or hub id; and the prompt. One word "
            "that names no model is a prompt for smollm2-135m. Without a prompt: a chat.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help=f"Engine spec, e.g. markov-rs:window=256 (also {ENGINE_VARIABLE}). See: larql engines",
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(help="Legacy: standard, markov-bounded or none. --engine wins.", metavar="KIND"),
    ] = None,
    context_window: Annotated[
        int, typer.Option(min=0, help="Window of the legacy names sliding, bounded, markov-bounded.")
    ] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            min=0,
            help=f"Most tokens to generate [{PROMPT_TOKENS}; in a chat {CHAT_TOKENS}].",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the K best; 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the nucleus of this mass; 1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop ids below this share of the best; 0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the random choices.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Show the K best first tokens; 1: off.")] = 1,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help=f"Continue the prompt as it is, no chat template (also {RAW_VARIABLE}=1)."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, before the first user message.")] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (deterministic), bfloat16, or auto.", show_default="auto")
    ] = None,
    activations: Annotated[str | None, typer.Option(help=ACTIVATIONS_HELP, show_default="mixed")] = None,
    ffn: Annotated[str, typer.Option(metavar="SPEC", help=FFN_HELP)] = "dense",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Ledger and stage tables too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Continue a prompt with the model, wrapped in its chat template; without a prompt, chat.

    The text goes to stdout, everything else to stderr. Exit codes: 0, 1 an engine failed, 2 wrong usage,
    spec or model, 130 interrupted.
    """
    began = time.perf_counter()
    words = words or []
    if len(words) > 2:
        raise typer.BadParameter(f"{len(words)} words are given, at most MODEL and PROMPT: quote the prompt")
    request = choose_request(words)
    if request.prompt is None and as_json:
        raise typer.BadParameter("--json needs a PROMPT: a chat has no single result")
    policy = check_ffn(ffn)
    choice = choose_engine(engine, kv_cache, context_window)
    limit = max_tokens if max_tokens is not None else CHAT_TOKENS if request.prompt is None else PROMPT_TOKENS
    options = _sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    settings = Settings(limit, options, top, verbose, began)
    for text in choice.warnings:
        settings.warn(text)
    settings.notice.start()
    try:
        from larql_kv.engine.ahead import executor_of

        built = _build(request.model, choice, policy, device, dtype, activations)
        built.profile(verbose)
        if verbose and executor_of(built) is not None:
            settings.warn("-v times the stages: steps run layer by layer, slower than the captured ones")
        session = _session(built, raw_wanted(raw), system, settings)
        if request.prompt is None:
            from larql_kv.cli.chat import chat

            chat(session, settings)
        else:
            _answer_once(session, request.prompt, settings, as_json)
    finally:
        settings.notice.stop()


def _sampling(**options: Any) -> dict[str, Any]:
    """The options, refused before anything is loaded."""
    from larql_kv.engine.sampling import SamplingOptions

    try:
        SamplingOptions(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return options


def _build(
    model: str,
    choice: EngineChoice,
    policy: FfnPolicy,
    device: str,
    dtype: str | None,
    activations: str | None,
) -> KvEngine:
    from larql_kv.engine import build_engine
    from larql_kv.ffn.policy import build_ffn
    from larql_kv.model.load import load_model

    loaded = load_model(model, device=device, dtype=dtype, activations=activations)
    return build_engine(choice.spec, loaded, build_ffn(policy, loaded))


def _session(engine: KvEngine, raw: bool, system: str | None, settings: Settings) -> Session:
    from larql_kv.cli.session import PlainText, Session, model_template

    template = None if raw else model_template(engine.model.tokenizer)
    if template is None and system:
        settings.warn("--system needs a chat template: it is put before the text as a line of its own")
    if template is None and not raw:
        note("this model has no chat template: its text is continued as it is")
    return Session(engine, template or PlainText(), system)


def _answer_once(session: Session, prompt: str, settings: Settings, as_json: bool) -> None:
    from larql_kv.cli.answer import Answer, stream_answer
    from larql_kv.cli.report import (
        print_ledger,
        print_stages,
        print_top,
        print_wire,
        run_dict,
        summary_line,
    )

    engine = session.engine

    def answer_ids(ids: list[int]) -> Answer:
        show = _discard if as_json else settings.show
        return stream_answer(
            engine, ids, settings.max_tokens, settings.options, show, settings.top, settings.began
        )

    answer = session.ask(prompt, answer_ids)
    if as_json:
        print_json({**run_dict(engine, answer, settings.warnings), **session.facts()})
    elif answer.text and not answer.text.endswith("\n"):
        write("\n")
    elif sys.stdout.isatty() and not answer.text:
        note("(no text)")
    if not as_json:
        print_top(answer)
        note(summary_line(engine, answer))
        if engine.info.note:
            note(engine.info.note)
    if settings.verbose and not as_json:
        print_ledger(engine.ledger())
        print_stages(engine.stage_summary())
        print_wire(engine.ffn.wire_facts())
    if answer.finish == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _discard(_text: str) -> None:
    return
