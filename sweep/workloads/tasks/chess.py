"""Name a legal, good move in a chess position: a graded reward that needs no engine."""

import importlib
import re
from typing import Any

import numpy as np

from sweep.config.objects import require_extra
from sweep.workloads.tasks.base import Completion, Prompt

FORMAT_REWARD, LEGAL_REWARD, BEST_REWARD = 0.2, 0.3, 0.5
MINIMUM_PLIES, MAXIMUM_PLIES = 4, 60
MOVE = re.compile(r"\s*([a-h][1-8][a-h][1-8][qrbn]?)\b")
VALUES = {1: 1.0, 2: 3.0, 3: 3.0, 4: 5.0, 5: 9.0, 6: 0.0}  # pawn … king
HELD_OUT = 1 << 40  # first number of the held-out positions; training does not reach it
POSITIONS = 1 << 41  # offset from the numbers of completions, which use the same seed
CHECKMATE = 1000.0


class Chess:
    """Prompts `FEN: … Move:`, for a move in UCI notation such as e2e4.

    Positions come from random play. The reward is FORMAT_REWARD for the form of a move, plus
    LEGAL_REWARD for a legal move, plus BEST_REWARD times the share of legal moves that are worse,
    by material after the opponent's best capture, and mobility.
    """

    prompts_in_epoch: int | None = None

    def __init__(self, seed: int) -> None:
        require_extra("chess", "chess", "task 'chess'")
        self._seed, self._chess = seed, importlib.import_module("chess")

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return an undecided position."""
        key = [self._seed, POSITIONS + number + (HELD_OUT if is_held_out else 0)]
        rng = np.random.Generator(np.random.Philox(key=key))
        board = self._chess.Board()
        for _ in range(int(rng.integers(MINIMUM_PLIES, MAXIMUM_PLIES))):
            moves = sorted(board.legal_moves, key=str)
            board.push(moves[int(rng.integers(len(moves)))])
            if board.is_game_over():
                board.pop()
                break
        fen = board.fen()
        return Prompt(f"FEN: {fen}\nMove:", facts={"fen": fen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Grade the move at the start of the completion."""
        components = {"format": 0.0, "legal": 0.0, "best": 0.0}
        match = MOVE.match(completion.text)
        if match is None:
            return components
        components["format"] = FORMAT_REWARD
        board = self._chess.Board(prompt.facts["fen"])
        values = {move.uci(): self._value(board, move) for move in list(board.legal_moves)}
        if (value := values.get(match[1])) is None:
            return components
        components["legal"] = LEGAL_REWARD
        worse = sum(other < value for other in values.values())
        is_best = value == max(values.values())
        components["best"] = BEST_REWARD * (1.0 if is_best else worse / (len(values) - 1))
        return components

    def _value(self, board: Any, move: Any) -> float:
        """Return the material of the side to move after the best capture in reply, and mobility."""
        side = board.turn
        board.push(move)
        if board.is_checkmate():
            board.pop()
            return CHECKMATE
        material = self._material(board, side)
        worst = 0.0
        for answer in board.legal_moves:
            if board.is_capture(answer):
                board.push(answer)
                worst = min(worst, self._material(board, side) - material)
                board.pop()
        mobility = -0.01 * board.legal_moves.count()
        board.pop()
        return float(material + worst + mobility)

    def _material(self, board: Any, side: bool) -> float:
        pieces = board.piece_map().values()
        return float(sum(VALUES[p.piece_type] * (1 if p.color == side else -1) for p in pieces))
