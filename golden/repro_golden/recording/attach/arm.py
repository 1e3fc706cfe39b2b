"""What is hooked into torch once it is imported. It changes no value and keeps its errors to itself."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["arm"]


def arm(when: Callable[[str, Callable[[Any], None]], object]) -> None:
    """Hook torch's optimizers, gradient scaler and gradient clipping of this process, and loggers that are imported.

    Args:
        when: does something with a module once the program has imported it.
    """
    import torch
    from torch.optim import optimizer as optimizers

    from repro_golden.recording.attach.alive import generators, megatron
    from repro_golden.recording.attach.alive.readings import Activations, gradients_of, handed_to
    from repro_golden.recording.attach.base import streams
    from repro_golden.recording.attach.base.guard import stand_in
    from repro_golden.recording.attach.base.settings import VARIABLE, Settings
    from repro_golden.recording.attach.base.steps import Steps
    from repro_golden.recording.attach.session import Session
    from repro_golden.recording.attach.stepping import by_hand, making_state, whole_graphs
    from repro_golden.recording.attach.written import saving
    from repro_golden.recording.attach.written.hearing import Hearing

    settings = Settings.from_text(os.environ[VARIABLE])
    session = Session(settings)
    held = gradients_of if settings.record else lambda _: {}
    steps = Steps(
        session.begin, _stepped(session, settings), handed_to, held, lambda: session.passes.by_closure(),
        functools.partial(making_state.only_makes_state, session),
    )  # fmt: skip
    # the compiler must leave the recorder alone; torch's optimizers are marked in the same way
    untraced = torch._disable_dynamo  # type: ignore[attr-defined]
    before, after = whole_graphs.hooks(steps, session.begin, untraced, lambda: _last(optimizers, after_all))
    optimizers.register_optimizer_step_pre_hook(before)
    after_all = optimizers.register_optimizer_step_post_hook(after)
    scaled = steps.outer(torch.amp.GradScaler.step, _scaled(session), _left_out)
    torch.amp.GradScaler.step = scaled  # type: ignore[method-assign]
    for name in ("scale", "update"):  # a program may unscale and step by itself
        _heard(torch.amp.GradScaler, name, session)
    _clipping(when, torch.nn.utils, session)
    for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        when(name, lambda module: _board(module.SummaryWriter, session))
    when("wandb.sdk.wandb_run", lambda module: _listen(module.Run, "log", _given, session))
    when("wandb.sdk.lib.noop_run", lambda module: _listen(module.NoopRun, "log", _given, session))
    megatron.hook(when, steps, session)
    making_state.hook(when, steps)
    session.around.watch()
    stand_in([torch.utils], "swap_tensors", functools.partial(_swapping, session=session))
    generators.watch()
    if settings.record:
        streams.watch()
        saving.hook(when, session)
    by_hand.hook(session)
    hearing = Hearing(session, [re.compile(text) for text in settings.metrics])
    when("tqdm.std", lambda module: _bars(module.tqdm, session, hearing.on_bars))
    session.hear = hearing.hear
    session.hear()  # again at each step: the program may put another stream in place
    if settings.activations and settings.record:
        Activations(settings.activations, session, untraced).watch()
    os.register_at_fork(after_in_child=session.forked)


def _last(optimizers: Any, handle: Any) -> None:
    """Have a hook run behind those of the program, which may change what it reads."""
    with contextlib.suppress(KeyError):  # the program has removed all
        optimizers._global_optimizer_post_hooks.move_to_end(handle.id)


def _stepped(session: Any, settings: Any) -> Callable[[Any], None]:
    """What is done at the end of a step; where a step's operations are asked for, the first step begins here."""
    if not settings.operations:
        step: Callable[[Any], None] = session.step
        return step
    from repro_golden.recording.attach.operations import StepOperations

    operations = session.operations = StepOperations(settings.operations)
    operations.at(0)

    def stepped(made: Any) -> None:
        session.step(made)
        operations.at(session.made)

    return stepped


def _clipping(when: Callable[[str, Callable[[Any], None]], object], utils: Any, session: Any) -> None:
    """Keep the norm that gradients are clipped by, before clipping."""
    import torch

    from repro_golden.recording.attach.base.guard import stand_in
    from repro_golden.recording.attach.stepping.by_hand import Depth

    depth = Depth()

    def of_clip(clip: Any) -> Any:
        @functools.wraps(clip)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return clip(*args, **kwargs)
            depth.value += 1
            try:
                norm = clip(*args, **kwargs)
            finally:
                depth.value -= 1
            if not depth.value:
                session.metric("grad_norm", norm, by_recorder=True)
            return norm

        return clip_grad_norm_

    def of_scale(scale: Any) -> Any:
        @functools.wraps(scale)
        def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                session.metric("grad_norm", total_norm, by_recorder=True)
            return scale(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm_

    stand_in([utils.clip_grad, utils], "clip_grad_norm_", of_clip)
    stand_in([utils.clip_grad, utils], "clip_grads_with_norm_", of_scale)  # since torch 2.6

    def of_fsdp(module: Any) -> None:  # which clips by itself, and what it does not shard by torch's
        wrapper = module.FullyShardedDataParallel
        wrapper.clip_grad_norm_ = of_clip(wrapper.clip_grad_norm_)

    when("torch.distributed.fsdp.fully_sharded_data_parallel", of_fsdp)


def _scaled(session: Any) -> Callable[..., Any]:
    def optimizer_of(scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Any:
        session.around.scaler(scaler)
        return optimizer

    return optimizer_of


def _left_out(_: Any, stepped: bool, scaler: Any, optimizer: Any, *__: Any, **___: Any) -> Any:
    """Whether a scaler skipped a step, in which a step call was seen or none was.

    Fused optimizers are always called, and say themselves what they made of it (`steps`).
    """
    import torch

    if stepped or isinstance(optimizer, torch.optim.Optimizer):
        return not stepped
    if not scaler.is_enabled():
        return False
    flags = list(scaler._found_inf_per_device(optimizer).values())  # one for each device, which is not waited for
    return flags[0] if len(flags) == 1 else any(map(bool, flags))


def _heard(scaler: Any, name: str, session: Any) -> None:
    method = getattr(scaler, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.around.scaler(self)
        return method(self, *args, **kwargs)

    setattr(scaler, name, call)


def _board(writer: Any, session: Any) -> None:
    _listen(writer, "add_scalar", lambda tag, scalar_value, *_, **__: {tag: scalar_value}, session)
    _listen(
        writer,
        "add_scalars",
        lambda main_tag, tag_scalar_dict, *_, **__: {f"{main_tag}/{k}": v for k, v in tag_scalar_dict.items()},
        session,
    )


def _bars(bar: Any, session: Any, on_bars: set[str]) -> None:
    """Keep what a progress bar is given to show, and its names in `on_bars`."""
    from repro_golden.base.printed.free_text import in_text
    from repro_golden.recording.attach.written.raw import SHOWN

    def shown(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        on_bars.update(numbers)
        return {f"{SHOWN}{name}": value for name, value in numbers.items()}

    def postfix(ordered_dict: Any = None, refresh: Any = True, **more: Any) -> Mapping[str, Any]:  # noqa: ARG001
        values = {**dict(ordered_dict or {}), **more}
        return shown({name: _from_text(value) if isinstance(value, str) else value for name, value in values.items()})

    _listen(bar, "set_postfix", postfix, session)
    for method in ("set_postfix_str", "set_description", "set_description_str"):
        _listen(bar, method, lambda text="", *_, **__: shown(in_text(str(text or ""))), session)


def _swapping(swap: Callable[[Any, Any], None], session: Any) -> Callable[[Any, Any], None]:
    """Torch swaps no tensors that somebody refers to weakly, as the recorder does."""

    @functools.wraps(swap)
    def call(t1: Any, t2: Any) -> None:
        again: list[Callable[[], None]] = []
        for known in (session.names, session.around, session.passes):  # also of a recorder that has failed
            try:
                again.append(known.let_go(t1, t2))
            except Exception as error:  # noqa: BLE001 - the program goes on
                session.fail(error)
        try:
            swap(t1, t2)
        finally:
            for take_up in [] if session.dead else again:
                take_up()

    return call


def _from_text(text: str) -> float | str:
    """A number that was made a text of for a progress bar; any other text as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _given(data: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """What wandb is given, mappings in it flattened as wandb does."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        inner = {f"{name}.{key}": item for key, item in _given(value).items()} if isinstance(value, Mapping) else {}
        flat |= inner or {str(name): value}
    return flat


def _listen(owner: Any, method: str, scalars: Callable[..., Mapping[str, Any]], session: Any) -> None:
    """Keep the numbers that a logger is given; how it is called, and whether that is right, is between the others."""
    log = getattr(owner, method)

    @functools.wraps(log)
    def call(logger: Any, *args: Any, **kwargs: Any) -> Any:
        numbers: dict[str, Any] = {}
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)  # for both to look at
        kwargs = {name: list(value) if isinstance(value, Iterator) else value for name, value in kwargs.items()}
        with contextlib.suppress(Exception):
            for name, value in scalars(*args, **kwargs).items():
                if hasattr(value, "detach") and value.numel() == 1:
                    numbers[str(name)] = value
                elif isinstance(value, (int, float)) or getattr(value, "size", None) == 1:
                    with contextlib.suppress(TypeError, ValueError, OverflowError):  # a text, say
                        numbers[str(name)] = float(value.item() if hasattr(value, "item") else value)
        for name, value in numbers.items():
            session.metric(name, value)
        return log(logger, *args, **kwargs)

    setattr(owner, method, call)
