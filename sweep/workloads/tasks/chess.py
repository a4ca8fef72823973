"""Name a legal, good move in a chess position: a graded reward that no engine is needed for."""

import re
from typing import Any

import numpy as np

from sweep.config.objects import require_extra
from sweep.workloads.tasks import Completion, Prompt

FORMAT_REWARD, LEGAL_REWARD, BEST_REWARD = 0.2, 0.3, 0.5
LEAST_PLIES, MOST_PLIES = 4, 60
MOVE = re.compile(r"\s*([a-h][1-8][a-h][1-8][qrbn]?)\b")
VALUES = {1: 1.0, 2: 3.0, 3: 3.0, 4: 5.0, 5: 9.0, 6: 0.0}  # pawn … king
HELD_OUT = 1 << 40  # numbers of positions that no training reaches
POSITIONS = 1 << 41  # beyond the numbers of completions, which draw from the same seed


def _library() -> Any:
    require_extra("chess", "chess", "task 'chess'")
    import chess

    return chess


class Chess:
    """`FEN: … Move:` and a move in the notation of UCI, such as e2e4.

    Positions come from random play. A move of the right form is worth FORMAT_REWARD, a legal one
    LEGAL_REWARD more, and BEST_REWARD times the share of legal moves that are worse, by material
    after the opponent's best capture, and mobility.
    """

    prompts_in_epoch: int | None = None

    def __init__(self, seed: int) -> None:
        self._seed, self._chess = seed, _library()

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a position that is not decided."""
        key = [self._seed, POSITIONS + number + (HELD_OUT if is_held_out else 0)]
        rng = np.random.Generator(np.random.Philox(key=key))
        board = self._chess.Board()
        for _ in range(int(rng.integers(LEAST_PLIES, MOST_PLIES))):
            moves = sorted(board.legal_moves, key=str)
            board.push(moves[int(rng.integers(len(moves)))])
            if board.is_game_over():
                board.pop()
                break
        fen = board.fen()
        return Prompt(f"FEN: {fen}\nMove:", facts={"fen": fen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Grade the move that the completion begins with."""
        parts = {"format": 0.0, "legal": 0.0, "best": 0.0}
        named = MOVE.match(completion.text)
        if named is None:
            return parts
        parts["format"] = FORMAT_REWARD
        board = self._chess.Board(prompt.facts["fen"])
        try:
            move = self._chess.Move.from_uci(named[1])
        except self._chess.InvalidMoveError:  # from a square to itself
            return parts
        legal = list(board.legal_moves)
        if move not in legal:
            return parts
        parts["legal"] = LEGAL_REWARD
        values = {other: self._value(board, other) for other in legal}
        worse = sum(values[other] < values[move] for other in legal)
        most = max(values.values())
        others = len(legal) - 1
        is_best = values[move] == most
        parts["best"] = BEST_REWARD * (1.0 if is_best else worse / others)
        return parts

    def _value(self, board: Any, move: Any) -> float:
        """Material for the side that moves, after the best capture in answer, and mobility."""
        side = board.turn
        board.push(move)
        if board.is_checkmate():
            board.pop()
            return 1000.0
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
