"""What is alive beside the optimizers' parameters: buffers, other modules, copies of parameters, lone leaves, scalers.

A program saves more than its optimizers hold: running means, a moving average, a target network, a critic that is
trained by hand. All of it that can be read is read at every step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from repro_golden.recording.attach.alive.collected import Alive
from repro_golden.recording.attach.alive.copies import CopyTest, Owned, held_in, shapes_of, tensors_in, unused
from repro_golden.recording.attach.alive.module_plan import ModulePlan, Part, Root
from repro_golden.recording.attach.alive.names import walk
from repro_golden.recording.attach.alive.opened import as_torch
from repro_golden.recording.attach.alive.reached import Reached, is_tensor
from repro_golden.recording.attach.alive.readable import all_readable, is_packed, readable
from repro_golden.recording.attach.alive.readings import Places, Reading, Tensors, groups_of, is_leaf, parameters_of
from repro_golden.recording.attach.alive.variables import names_of, of_type, variables
from repro_golden.recording.attach.base.by_identity import ByIdentity, id_of

__all__ = ["Beside"]

_WIDE = 4
"""How many times as many tensors as there are parameters a container may have that is tested at every step."""
_OFTEN = 16
"""Searches for what is new from which on they are made at every power of two of steps only."""
_MEMORY_SAVER = "torch_memory_saver"


class Beside:
    """Searched for when modules were made or changed, and at the steps 0, 1, 2, 4, 8 and so on.

    Mappings, lists and, where modules were made since, modules that variables lead to are looked for at every step, for
    a program may make them anew each time.
    Nothing is kept alive by it, but for these, which cannot be referred to weakly: one that nobody else holds is let go
    at the next step.

    Attributes:
        changed: Whether a module was made or changed since the last search.
        unread: By name, why something that was seen was not read.
    """

    def __init__(self) -> None:
        self.changed = True
        self.unread: dict[str, str] = {}
        self._began = gc.get_freeze_count()  # CPython 3.12 begins with some hundred; nothing of torch's is among them
        self._frozen = False
        self._roots: list[Root] = []
        self._plan = ModulePlan()
        self._searched = ByIdentity[bool]()
        self._led: set[str] = set()
        self._new: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self._packed: dict[str, str] = {}
        self._held: set[int] = set()
        self._copies: list[tuple[str, Any]] = []
        self._reached = Reached()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._wholes: list[Counter[tuple[int, ...]]] = []
        self._leaves: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._lasting: set[int] = set()
        self._scalers: list[weakref.ref[Any]] = []
        self._generators: list[tuple[str, torch.Generator]] = []
        self._searches = 0
        self._called = _Called()
        self._known: list[weakref.ref[torch.nn.Module]] = []

    def watch(self) -> None:
        """Be told of new modules: of their tensors, and of copies, which are made without them."""
        registered = torch.nn.modules.module

        def change(*_: Any) -> None:
            self.changed = True

        registered.register_module_parameter_registration_hook(change)
        registered.register_module_buffer_registration_hook(change)
        registered.register_module_module_registration_hook(change)
        restore = torch.nn.Module.__setstate__

        def __setstate__(module: torch.nn.Module, state: Any) -> None:  # noqa: N807 - it stands for one
            self.changed = True
            restore(module, state)  # type: ignore[no-untyped-call]

        torch.nn.Module.__setstate__ = __setstate__  # type: ignore[method-assign]

    def scaler(self, scaler: Any) -> None:
        """A gradient scaler is in use."""
        if all(known() is not scaler for known in self._scalers):
            self._scalers.append(weakref.ref(scaler))

    def let_go(self, *tensors: torch.Tensor) -> Callable[[], None]:
        """Refer to none of some tensors for now; a call of what is returned takes them up again."""
        self._plan = ModulePlan()
        ids = set(map(id_of, tensors))
        self._called.forget(ids)
        before = [(name, leaf()) for name, leaf in self._leaves]
        self._leaves = [pair for pair in self._leaves if id_of(pair[1]()) not in ids]

        def again() -> None:
            self._leaves = [(name, weakref.ref(leaf)) for name, leaf in before if leaf is not None]
            before.clear()

        return again

    def forget(self) -> None:
        """Search anew: in the child of a fork."""
        self.changed, self.unread, self._searches = True, {}, 0
        self._roots, self._held, self._copies, self._leaves, self._generators = [], set(), [], [], []
        self._plan = ModulePlan()

    def trained_by_hand(self, step: int, known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters and leaves that have a gradient, in the order in which they are found.

        Args:
            step: The step's number.
            known: Those that had one before.
        """
        self._refresh(step, known)
        tensors = [leaf() for _, leaf in self._leaves]
        for root in self._roots:
            modules = [part.module() for part in root.parts]
            tensors += [
                tensor for module in modules if module is not None for tensor in list(module._parameters.values())
            ]
        with_grad = {id_of(tensor): tensor for tensor in tensors if tensor is not None and tensor.grad is not None}
        return list(({id_of(p): p for p in known} | with_grad).values())

    def led_to(self, *, end: bool = False) -> dict[str, torch.Tensor]:
        """Leaves that variables, and the mappings and lists that these lead to, hold now; by name."""
        named: dict[str, torch.Tensor] = {}
        for name, container in self._reached.containers(end=end):
            named |= {f"{name}.{key}": tensor for key, tensor in tensors_in(container)}
        named |= {name: value for name, value in variables(also=self._reached.modules) if is_tensor(value)}
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad and is_leaf(tensor)}

    def _refresh(self, step: int, parameters: Iterable[torch.Tensor], *, end: bool = False) -> bool:
        """Whether it was time to search."""
        regular = step & (step - 1) == 0
        due = regular or (self.changed and self._searches < _OFTEN)
        if due:
            self.search(parameters, end=end)
        return due

    def readings(
        self, step: int, parameters: Sequence[torch.Tensor], *, end: bool = False
    ) -> Iterator[tuple[str, Reading]]:
        """What there is, by the prefix of its names, in an order that does not depend on the program's.

        Args:
            step: The step's number.
            parameters: What the optimizers hold that have made steps.
            end: Whether the program has ended.
        """
        if not end:  # an average in a function that has returned may have been changed after the last step
            # a container that only this list and the loop's variable refer to is nobody's any more
            self._copies = [(name, container) for name, container in self._copies if sys.getrefcount(container) > 3]
        if not self._refresh(step, parameters, end=end):
            self._find_copies(parameters, None, end=end)
            self._find_networks()
        if end:
            self._find_generators(end=True)
        read = set(map(id_of, parameters))  # an optimizer that never steps reads nothing of what it holds
        self.unread = dict(self._packed)
        if end:
            self._count_frozen()
        if self._frozen:
            self.unread["what gc.freeze() hid"] = "the garbage collector, which is asked for what is alive, is not told"
        out = self._of_modules(read)
        for name, container in self._copies:
            tensors = Tensors()
            for place, (key, held) in enumerate(held_in(container)):
                # a tensor as a key has no text of its own
                label = unused(str(place if is_tensor(key) else key), tensors.items())
                tensor = as_torch(held)
                if not is_tensor(tensor):
                    self.unread[f"copy/{name}/{label}"] = f"it is of {held.dtype}"
                elif id_of(held) not in read and self._is_there(f"copy/{name}/{label}", tensor):
                    tensors[label] = tensor
            out[f"copy/{name}/"] = readable(f"copy/{name}/", Reading(tensors, {}), self.unread)
        lone = Tensors()
        for name, reference in self._leaves:
            leaf = reference()
            if leaf is None or id_of(leaf) in read or id_of(leaf) not in self._lasting:
                continue
            if self._is_there(f"leaf/{name}", leaf):
                lone[name] = leaf
        self._put_mapped(out, read)
        out["leaf/"] = readable("leaf/", Reading(lone, {}), self.unread)
        self._generators = [(name, g) for name, g in self._generators if sys.getrefcount(g) > 3]
        out["rng/own/"] = Reading(Tensors((name, g.get_state()) for name, g in self._generators), {})
        out["scaler/"] = Reading(Tensors(self._scales()), {})
        yield from sorted(out.items())

    def _of_modules(self, read: set[int]) -> dict[str, Reading]:
        """What modules own, but for what was read; ids of what is read are added to that."""
        owned = self._plan.owned(self._roots, frozenset(read))
        taken_away = _MEMORY_SAVER in sys.modules and any(owning.managed for owning in owned.all)
        if not taken_away and all_readable(owned.tensors):
            read.update(map(id_of, owned.tensors))
            return owned.readings()
        out: dict[str, Reading] = {}
        for (whole, path, place, managed), tensor in zip(owned.all, owned.tensors, strict=True):
            if id_of(tensor) in read or not self._is_there(f"{whole}{path}", tensor, managed=managed):
                continue
            read.add(id_of(tensor))
            reading = out.setdefault(whole, Reading(Tensors(), Places()))
            reading.tensors[path] = tensor
            if place is not None:
                reading.places[path] = place
        for whole, reading in out.items():
            why = dict[str, str]()
            out[whole] = readable(whole, reading, why)
            self.unread |= {whole[:-1] if whole.startswith("module/") else name: reason for name, reason in why.items()}
        return out

    def _put_mapped(self, out: dict[str, Reading], read: set[int]) -> None:
        """Put what modules have in mappings of their own, as the scales of quantized weights, to what was read."""
        mapped = self._plan.mapped()
        taken = {id_of(t) for _, container in self._copies for _, t in held_in(container)} if mapped else set()
        for whole, path, tensor in mapped:
            if id_of(tensor) in read or id_of(tensor) in taken or not self._is_there(f"{whole}{path}", tensor):
                continue
            read.add(id_of(tensor))
            held = readable(whole, Reading(Tensors({path: tensor}), {}), self.unread)
            known = out.setdefault(whole, Reading(Tensors(), Places()))
            out[whole] = Reading(Tensors(known.tensors | held.tensors), known.places)

    def _scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, known in enumerate(self._scalers):
            scaler = known()
            for key in ("_scale", "_growth_tracker"):
                value = getattr(scaler, key, None)
                if isinstance(value, torch.Tensor):
                    yield f"{key[1:]}/{number}" if number else key[1:], value

    def _is_there(self, name: str, tensor: torch.Tensor, *, managed: bool = True) -> bool:
        """Whether nothing else may have taken its memory away, which would be told."""
        if not managed or _MEMORY_SAVER not in sys.modules or not tensor.is_cuda:
            return True
        word, _, rest = name.partition("/")
        name = word if word in ("buffer", "unsaved", "frozen") else name  # of these it is all of them
        name = f"{word}/{rest.partition('/')[0]}" if word == "module" else name
        self.unread[name] = "torch_memory_saver may have taken its memory away"
        return False

    # -- search

    def search(self, parameters: Iterable[torch.Tensor], *, end: bool = False) -> None:
        """Look through all that is alive.

        Args:
            parameters: What the optimizers hold that have made steps.
            end: Whether the program has ended. What it left to the garbage collector is alive too then: lone leaves
                are those of its last step, and new copies those that a variable leads to.
        """
        self._searches += 1
        self.changed = False
        alive = Alive.now()
        held = {id_of(p): p for p in parameters}
        for optimizer in alive.optimizers:
            held |= {id_of(p): p for group in groups_of(optimizer) for p in parameters_of(group)}
        before, self._held = self._held, set(held)
        self._find_roots(self._still(alive.modules))
        self._optimizers = [weakref.ref(optimizer) for optimizer in alive.optimizers]
        self._wholes = self._find_wholes()
        owned = Owned.of(alive.modules, alive.optimizers, held.values())
        if not end:
            self._find_leaves(alive.tensors, owned.ids(), before)
        self._find_copies(list(held.values()), alive.containers, owned, end=end)
        self._find_generators()

    def _still(self, modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Modules that are alive, with those that were and that the program has hidden from the collector since."""
        self._count_frozen()
        if self._frozen:
            listed = set(map(id_of, modules))
            hidden = [
                module for known in self._known if (module := known()) is not None and id_of(module) not in listed
            ]
            modules = [*hidden, *modules]
        self._known = [weakref.ref(module) for module in modules]
        return modules

    def _count_frozen(self) -> None:
        """Learn whether the program has hidden something from the collector; too dear for each step."""
        self._frozen = gc.get_freeze_count() > self._began

    def _find_generators(self, *, end: bool = False) -> None:
        """Look from the variables, for the collector does not know them; at the end no frame leads to any.

        That of a sampler or loader is as far as the loader reads ahead, which is no matter of the training.
        """
        defaults = {id_of(torch.default_generator), *(id_of(g) for g in torch.cuda.default_generators)}
        loading = sys.modules.get("torch.utils.data")
        readers = (loading.Sampler, loading.DataLoader) if loading else ()
        there = of_type(torch.Generator, self._reached.modules if end else (), readers)
        self._generators = [(name, g) for name, g in there if id_of(g) not in defaults]

    def _find_roots(self, modules: list[torch.nn.Module]) -> None:
        inner = {id_of(child) for m in modules for child in list(m._modules.values()) if child is not None}
        roots: list[tuple[torch.nn.Module, bool, list[Part]]] = []
        packed = []
        for root in (m for m in modules if id_of(m) not in inner):
            parts = list(walk(root, "", None, set()))
            stepped = any(id_of(p) in self._held for _, module, _ in parts for p in list(module._parameters.values()))
            holders = [Part(weakref.ref(m), path, config) for path, m, config in parts if m._parameters or m._buffers]
            for _, module, _ in parts:
                self._searched.put(module, True)
            if holders:
                roots.append((root, stepped, holders))
            if any(is_packed(module) for _, module, _ in parts):
                packed.append(root)
        self._packed = {f"module/{name}": "its weights are packed" for name, _ in self._called.of(packed, "")}
        self._led, self._new = set(), []
        alone = sum(stepped for _, stepped, _ in roots) == 1
        names = self._called.of([root for root, _, _ in roots], "")
        self._plan = ModulePlan()
        named = [
            (name.partition("#")[0] == type(root).__name__, Root("" if stepped and alone else name, stepped, holders))
            for (name, root), (_, stepped, holders) in zip(names, roots, strict=True)
        ]
        # a tensor of several is read as that of one that has a name: the order in which the collector knows them says
        # when it last ran
        self._roots = [root for _, root in sorted(named, key=lambda pair: pair[0])]

    def _find_networks(self) -> None:
        """Take modules that variables lead to and that no search has met, which have become rare.

        Each has the name that leads to it now, and is one no more when none does.
        """
        if not self.changed:
            return
        met = [(name, network) for name, ref in self._reached.networks if (network := ref()) is not None]
        new = [(name, network) for name, network in met if self._searched.get(network) is None]
        if len(new) == len(self._new) and all(
            a == c and ref() is b for (a, b), (c, ref) in zip(new, self._new, strict=True)
        ):
            return
        self._new = [(name, weakref.ref(network)) for name, network in new]
        searched = [root for root in self._roots if root.name not in self._led]
        alive = [root for root in searched if any(part.module() is not None for part in root.parts)]
        known = {id_of(module) for root in alive for part in root.parts if (module := part.module()) is not None}
        self._roots, self._led = alive, set()
        there = [(name, network, list(walk(network, "", None, set()))) for name, network in new]
        for name, network, parts in sorted(there, key=lambda each: -len(each[2])):  # what holds others comes first
            holders = [Part(weakref.ref(m), path, config) for path, m, config in parts if m._parameters or m._buffers]
            if known.issuperset(id_of(part.module()) for part in holders):
                if not any(id_of(module) in known for _, module, _ in parts):
                    self._searched.put(network, True)  # it has nothing, and is not walked through again
                continue
            known |= {id_of(module) for _, module, _ in parts}
            stepped = any(id_of(p) in self._held for _, module, _ in parts for p in list(module._parameters.values()))
            called = unused(name, [(root.name, root) for root in self._roots])
            self._roots.append(Root(called, stepped, holders))
            self._led.add(called)
        self._plan = ModulePlan()

    def _find_leaves(self, tensors: Iterable[torch.Tensor], owned: set[int], trained: set[int]) -> None:
        before = [leaf() for _, leaf in self._leaves]
        lone = [t for t in tensors if id_of(t) not in owned and t.requires_grad and is_leaf(t)]
        self._leaves = [(name, weakref.ref(leaf)) for name, leaf in self._called.of(lone, "tensor")]
        # one that was there at the last search too is no passing input of a stage or a checkpoint, nor is one that an
        # optimizer had which is gone
        self._lasting = {id_of(leaf) for leaf in before if leaf is not None} | trained

    def _find_wholes(self) -> list[Counter[tuple[int, ...]]]:
        """The shapes of each optimizer's parameters, and of each root's."""
        optimizers = [o for reference in self._optimizers if (o := reference()) is not None]
        shapes = [shapes_of(p for g in groups_of(o) for p in parameters_of(g)) for o in optimizers]
        for root in self._roots:
            modules = [part.module() for part in root.parts]
            shapes.append(
                shapes_of(p for m in modules if m is not None for p in list(m._parameters.values()) if p is not None)
            )
        several = [counts for counts in shapes if sum(counts.values()) > 1]
        return [counts for number, counts in enumerate(several) if counts not in several[:number]]

    def _find_copies(
        self,
        parameters: Sequence[torch.Tensor],
        alive: Sequence[Any] | None,
        owned: Owned | None = None,
        *,
        end: bool,
    ) -> None:
        """Look from the variables, and at what is alive where that was searched.

        What is known keeps its name as long as a variable leads to it; else what the name leads to now has its place.

        Args:
            parameters: What the optimizers hold.
            alive: All mappings and lists of tensors; None where there was no search.
            owned: What belongs to modules and optimizers, which is read there; by default what the last search knew.
            end: Whether the program has ended: what no variable leads to may be what it left to the collector.
        """
        reached = self._reached.containers(end=end)
        names = {id_of(container): name for name, container in reached}
        known = {id_of(container) for _, container in self._copies}
        fresh = [p for p in parameters if id_of(p) not in self._held]  # of an optimizer that is newer than the search
        wholes = [*self._wholes, shapes_of(fresh)] if len(fresh) > 1 else self._wholes
        test = CopyTest(wholes, parameters, lambda: self._owned(parameters) if owned is None else owned)
        if alive is not None and not end:  # at the end the model may have gone, and its average is still held here
            self._copies = [pair for pair in self._copies if test.passes(pair[1], named=True)]
        there = [pair for pair in self._copies if id_of(pair[1]) in names]
        gone = [pair for pair in self._copies if id_of(pair[1]) not in names]
        taken = {id_of(t) for _, container in there for _, t in held_in(container)}
        for name, container in reached:
            if (
                id_of(container) in known
                or len(container) > _WIDE * test.most
                or not test.passes(container, named=True)
            ):
                continue
            ids = {id_of(t) for _, t in held_in(container)}
            others = {id_of(t) for label, c in gone if label.partition("#")[0] != name for _, t in held_in(c)}
            if ids & (taken | others):  # another list of the same tensors has nothing new
                continue
            taken |= ids
            there.append((unused(name, there), container))
        used = {label for label, _ in there}
        self._copies = there + [pair for pair in gone if pair[0] not in used]
        if alive is not None:
            self._find_hidden(alive, test, end=end)

    def _find_hidden(self, alive: Sequence[Any], test: CopyTest, *, end: bool) -> None:
        """Take those that the look did not get to; of only some parameters' copies, those that have a name."""
        known = {id_of(container) for _, container in self._copies}
        taken = {id_of(t) for _, container in self._copies for _, t in held_in(container)}
        new = []
        for container in alive:
            ids = {id_of(t) for _, t in held_in(container)}
            if id_of(container) in known or ids & taken or not test.passes(container, named=True):
                continue
            new.append((container, ids))
        names = names_of([container for container, _ in new]) if new else {}
        for container, ids in new:
            name = names.get(id_of(container))
            if ids & taken or (name is None and (end or not test.passes(container, named=False))):
                continue
            taken |= ids
            self._copies.append((unused(name or "copy", self._copies), container))

    def _owned(self, parameters: Sequence[torch.Tensor]) -> Owned:
        modules = [module for root in self._roots for part in root.parts if (module := part.module()) is not None]
        optimizers = [o for reference in self._optimizers if (o := reference()) is not None]
        return Owned.of(modules, optimizers, parameters)


class _Called:
    """What objects are called: what they were called first, for as long as they live."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Callable[[], Any], str]] = {}

    def of(self, objects: Sequence[Any], fallback: str) -> Iterator[tuple[str, Any]]:
        """Each object with a name that no other of them has.

        Args:
            objects: Modules or tensors.
            fallback: What one is called that nothing refers to by name; by default its class.
        """
        names = {id_of(o): name for o in objects if (name := self._known(o))}
        new = [o for o in objects if id_of(o) not in names]
        all_names = names | (names_of(new) if new else {})
        used: Counter[str] = Counter()
        for item in objects:
            name = all_names.get(id_of(item), fallback or type(item).__name__)
            self._names[id_of(item)] = (weakref.ref(item), name)
            used[name] += 1
            yield name if used[name] == 1 else f"{name}#{used[name] - 1}", item

    def forget(self, ids: set[int]) -> None:
        """Refer to none of the objects with these ids."""
        self._names = {key: known for key, known in self._names.items() if key not in ids}

    def _known(self, item: Any) -> str | None:
        referent, name = self._names.get(id_of(item), (lambda: None, None))
        return name if referent() is item else None
