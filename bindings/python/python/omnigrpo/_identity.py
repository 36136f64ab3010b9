"""Digests of functions, by which a run knows whether a reward, a tool or an environment has changed.

A digest covers the code of a function, its defaults, the values of its closure and of the globals that it names, and the functions of the
user that it calls. It covers the class and the attributes of a callable object, the arguments of a `functools.partial`, and the object of
a bound method. Line numbers, comments and docstrings do not count. Functions and classes of installed packages count by their names.

What a function changes itself is its state and does not count, so that an interrupted run resumes although its reward has counted its
calls: variables and attributes that it assigns, and containers if it changes one.
"""

import array
import collections
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import inspect
import operator
import os
import pathlib
import re
import site
import sysconfig
import types
import uuid

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...))
_CONTAINERS = (list, tuple, set, frozenset, dict)
# Values of the standard library whose text says all.
_VALUES = (
    decimal.Decimal, fractions.Fraction, pathlib.PurePath, uuid.UUID, slice, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo
)  # fmt: skip
# Values whose text says all, and that a function may change.
_BUFFERS = (bytearray, array.array)
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
# Methods by which a function changes a container.
_CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft", "appendleft", "remove", "discard", "clear"}
_INSTALLED = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages(), site.getusersitepackages()}
    if path
)
# Maximum number of values that are read, so that a reward that holds a data set costs no time.
_MAX_ITEMS = 10_000


def digest(function):
    """Return the digest of a function, as 32 hexadecimal digits."""
    found = _Found()
    found.add("reward", function)
    return found.hash.hexdigest()


class _Found:
    def __init__(self):
        self.hash, self.seen, self.items = hashlib.blake2b(digest_size=16), {}, 0

    def put(self, *words):
        self.hash.update("\0".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\1")

    def add(self, name, value, state=frozenset()):
        """Add a value. Containers are left out if `state` has "[]"."""
        self.items += 1
        if self.items > _MAX_ITEMS:
            return
        if isinstance(value, enum.Enum):
            self.add(f"{name} class", type(value))
            self.put(name, value.name, repr(value.value))
        elif isinstance(value, _PLAIN):
            self.put(name, type(value).__name__, repr(value))
        elif isinstance(value, types.CodeType):
            self.code(name, value)
        elif id(value) in self.seen:
            self.put(name, "again", self.seen[id(value)][0])
        else:
            # The value is kept, so that no other one gets its id.
            self.seen[id(value)] = len(self.seen), value
            self.object(name, value, state)

    def object(self, name, value, state):
        if isinstance(value, types.MethodType):
            self.add(f"{name} method", value.__func__)
            self.add(f"{name} object", value.__self__, _state(value.__func__))
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.add(f"{name} {part}", getattr(value, part))
        elif isinstance(value, types.FunctionType):
            self.function(name, value)
        elif isinstance(value, types.ModuleType):
            self.put(name, "module", value.__name__)
        elif isinstance(value, type):
            self.kind(name, value)
        elif type(value) in _CONTAINERS:
            self.container(name, value, state)
        elif isinstance(value, re.Pattern):
            self.put(name, "pattern", value.pattern, value.flags)
        elif isinstance(value, _VALUES):
            self.put(name, type(value).__name__, repr(value))
        elif isinstance(value, _BUFFERS):
            self.put(name, type(value).__name__, "state" if "[]" in state else repr(value))
        elif isinstance(value, _GETTERS):
            self.put(name, type(value).__name__)
            self.add(f"{name} arguments", value.__reduce__()[1:])
        elif isinstance(value, (*_CONTAINERS, collections.deque, types.MappingProxyType)) and not is_own(type(value)):
            self.container(name, value, state)
        elif type(value) is types.SimpleNamespace:
            self.container(name, vars(value), state)
        elif callable(getattr(value, "__wrapped__", None)):
            self.add(f"{name} wrapped", value.__wrapped__)
        elif is_own(type(value)):
            self.kind(f"{name} class", type(value))
            called = getattr(type(value), "__call__", None)
            state = state | _state(*(member for member in vars(type(value)).values() if member is not vars(type(value)).get("__init__")))
            self.put(name, called is not None)
            if isinstance(value, (*_CONTAINERS, collections.deque)):
                self.container(f"{name} items", value, state)
            slots = {slot: getattr(value, slot) for slot in getattr(type(value), "__slots__", ()) if hasattr(value, slot)}
            for attribute, own in sorted({**slots, **getattr(value, "__dict__", {})}.items()):
                if attribute not in state:
                    self.add(f"{name}.{attribute}", own, state)
        elif hasattr(value, "tobytes") and (hasattr(value, "dtype") or hasattr(value, "mode")):
            # An array of NumPy, or a picture of Pillow.
            about = [getattr(value, about, "") for about in ("dtype", "shape", "mode", "size")]
            self.put(name, *about, hashlib.blake2b(value.tobytes()).hexdigest())
        elif hasattr(value, "untyped_storage") and hasattr(value, "dtype"):
            # A tensor of PyTorch. NumPy does not have all of its types.
            self.put(name, value.dtype, value.shape, value.detach().flatten()[:_MAX_ITEMS].tolist())
        else:
            kind = type(value)
            self.put(name, kind.__module__, kind.__qualname__, getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))

    def container(self, name, value, state):
        if "[]" in state and not isinstance(value, (tuple, frozenset)):
            return self.put(name, "state")
        self.put(name, type(value).__name__, len(value))
        if isinstance(value, (set, frozenset)):
            # Sets have no order.
            return self.put(*sorted(self.part(one) for one in value))
        pairs = value.items() if isinstance(value, (dict, types.MappingProxyType)) else enumerate(value)
        for key, own in pairs:
            self.add(f"{name}[{key!r}]", own, state)

    def part(self, value):
        """Return the digest of a value of its own."""
        part = _Found()
        part.seen, part.items = dict(self.seen), self.items
        part.add("", value)
        self.items = part.items
        return part.hash.hexdigest()

    def function(self, name, function):
        if not is_own(function):
            return self.put(name, "function", function.__module__, function.__qualname__)
        state = _state(function)
        self.code(name, function.__code__, function.__doc__)
        self.add(f"{name} defaults", function.__defaults__)
        self.add(f"{name} keywords", function.__kwdefaults__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        values = {variable: cell.cell_contents for variable, cell in cells if _is_set(cell)}
        values.update({name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__})
        for variable, value in sorted(values.items()):
            if variable not in state:
                self.add(f"{name} {variable}", value, state)

    def code(self, name, code, doc=None):
        self.put(name, code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
        self.put(code.co_code.hex(), *code.co_names, "", *code.co_varnames, "", *code.co_freevars, "", *code.co_cellvars)
        for constant in code.co_consts:
            if doc is None or constant != doc:
                self.add(f"{name} constant", constant)

    def kind(self, name, kind):
        self.put(name, "class", kind.__module__, kind.__qualname__)
        if not is_own(kind):
            return
        for base in kind.__bases__:
            self.add(f"{name} base", base)
        for member, value in sorted(vars(kind).items()):
            value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(value, property):
                self.add(f"{name}.{member}", (value.fget, value.fset))
            elif not (member.startswith("__") and member.endswith("__")) or isinstance(value, types.FunctionType):
                self.add(f"{name}.{member}", value)


def _is_set(cell):
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def is_own(value):
    """Return whether a function or a class is the user's, and not that of an installed package."""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
    elif value.__module__ == "__main__":
        return True
    else:
        # A module of the interpreter has no file.
        file = getattr(inspect.getmodule(value), "__file__", None)
        if file is None:
            return False
    return not os.path.realpath(file).startswith(_INSTALLED)


def _codes(code):
    """Return a code and the codes within it, such as those of lambdas."""
    return [code, *(inner for one in code.co_consts if isinstance(one, types.CodeType) for inner in _codes(one))]


def _names(code):
    """Return the names that a code reads from outside."""
    return {name for one in _codes(code) for name in one.co_names}


def _state(*functions):
    """Return the names that functions assign outside of themselves, and "[]" if they change containers."""
    names = set()
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        for one in _codes(code) if code is not None else ():
            for step in dis.get_instructions(one):
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
                    names.add(step.argval)
                elif step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in one.co_freevars:
                    names.add(step.argval)
                elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in _CHANGES:
                    names.add("[]")
    return frozenset(names)
