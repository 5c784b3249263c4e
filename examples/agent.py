"""An agent with tools that tries several plans at once, each in a fork of one conversation.

    python examples/agent.py [--model MODEL] [TASK]

The loop knows nothing of the engine but ``turn`` and ``fork``. It parses tool calls itself, in the
form most small models are trained on: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
Branches share the KV of everything before the fork, so three plans do not cost three prompts.
The default model is too small to use tools well; a larger one is named with ``--model``.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from sessionkv import SamplingParams, launch

MAX_STEPS = 6
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
SYSTEM = """You solve tasks step by step with tools. To use one, answer with a single line:
<tool_call>{"name": "calculate", "arguments": {"expression": "2 * 21"}}</tool_call>
Tools: calculate(expression); word_count(text). When you know the result, answer in plain words."""
PLANS = ("Solve it directly.", "Split it into parts first.", "Estimate first, then compute.")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=96)


class Reply(Protocol):
    """What a turn gives back; ``sessionkv``'s replies have more."""

    @property
    def text(self) -> str:
        """The reply."""
        ...


class Session(Protocol):
    """What the loop needs of a session."""

    def turn(self, text: str, /, *, sampling: SamplingParams) -> Reply:
        """Send what is new, get the reply."""
        ...

    def fork(self, name: str) -> Session:
        """The same conversation under another name."""
        ...


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a branch ended: its answer, or None when it ran out of steps."""

    plan: str
    answer: str | None
    steps: int


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a reply; what is not a call in the right form is not one."""
    calls = []
    for match in TOOL_CALL.finditer(text):
        try:
            value = json.loads(match.group(1))
        except json.JSONDecodeError:
            continue
        if isinstance(value.get("name"), str) and isinstance(value.get("arguments", {}), dict):
            calls.append(ToolCall(value["name"], value.get("arguments", {})))
    return calls


_OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Arithmetic, and nothing else, of a short expression."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers and + - * /")

    return f"{value(ast.parse(expression[:200], mode='eval').body):g}"


TOOLS: Mapping[str, Callable[..., str]] = {
    "calculate": calculate,
    "word_count": lambda text: str(len(text.split())),
}


def run_tool(call: ToolCall) -> str:
    """The tool's result, or what was wrong, in words the model can use."""
    tool = TOOLS.get(call.name)
    if tool is None:
        return f"error: no tool {call.name!r}; there are {', '.join(TOOLS)}"
    try:
        return tool(**call.arguments)
    except (TypeError, ValueError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error}"


def run_agent(session: Session, task: str, *, plan: str = "") -> Outcome:
    """Turn after turn until a reply has no tool call: only results are sent, never the history."""
    message = f"{task}\n{plan}".strip()
    for step in range(1, MAX_STEPS + 1):
        reply = session.turn(message, sampling=SAMPLING).text
        calls = parse_tool_calls(reply)
        if not calls:
            return Outcome(plan, reply.strip(), step)
        message = "\n".join(f"{call.name} returned {run_tool(call)}" for call in calls)
    return Outcome(plan, None, MAX_STEPS)


def run_branches(session: Session, task: str, plans: Sequence[str] = PLANS) -> list[Outcome]:
    """Every plan in a fork of its own, all at once; outcomes in the order of the plans."""
    branches = [session.fork(f"plan-{number}") for number in range(1, len(plans) + 1)]
    with ThreadPoolExecutor(len(plans)) as pool:
        return list(pool.map(lambda b, p: run_agent(b, task, plan=p), branches, plans))


def main() -> None:
    """Run the branches on a private engine and print how each ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", nargs="?", default="How much is 17 boxes of 12 eggs, minus 9?")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with launch(args.model) as engine:
        session = engine.client().open("agent", system=SYSTEM)
        session.turn("Are you ready?", sampling=SAMPLING)
        for outcome in run_branches(session, args.task):
            print(f"{outcome.plan} ({outcome.steps} steps)\n  {outcome.answer}")


if __name__ == "__main__":
    main()
