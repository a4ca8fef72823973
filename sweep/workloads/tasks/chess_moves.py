"""The task `chess`: moves in positions of random play; needs the package chess."""

import re
from typing import Any

import numpy as np

from sweep.usercode.objects import require_extra
from sweep.workloads.tasks.task import Completion, Prompt, Task

MOVE = re.compile(r"\s*([a-h][1-8][a-h][1-8][qrbn]?)\b")
VALUES = {1: 1.0, 2: 3.0, 3: 3.0, 4: 5.0, 5: 9.0, 6: 0.0}  # pawn … king
HELD_OUT_POSITIONS = 1 << 40  # first number of the held-out positions; training does not reach it
POSITIONS = 1 << 41  # offset from the numbers of completions, which use the same seed


class Chess(Task):
    """Prompts `FEN: … Move:`, for a move in UCI notation such as e2e4.

    Positions come from random play. The reward is 0.2 for the form of a move, plus 0.3 for a legal
    one, plus 0.5 times the share of legal moves that are worse, by material and mobility.
    """

    @staticmethod
    def check_installed() -> None:
        require_extra("chess", "chess", "the task of chess moves")

    def __init__(self, text: object, seed: int, prompt_tokens: int) -> None:
        self.check_installed()
        import chess

        self._new_board = chess.Board
        self._seed = seed

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        if is_held_out:
            number += HELD_OUT_POSITIONS
        rng = np.random.Generator(np.random.Philox(key=[self._seed, POSITIONS + number]))
        board = self._new_board()
        for _ in range(int(rng.integers(4, 60))):
            moves = sorted(board.legal_moves, key=str)
            board.push(moves[int(rng.integers(len(moves)))])
            if board.is_game_over():
                board.pop()
                break
        fen = board.fen()
        return Prompt(f"FEN: {fen}\nMove:", facts={"fen": fen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        reward = {"format": 0.0, "legal": 0.0, "best": 0.0}
        match = MOVE.match(completion.text)
        if match is None:
            return reward

        reward["format"] = 0.2
        board = self._new_board(prompt.facts["fen"])
        values = {move.uci(): self._value(board, move) for move in list(board.legal_moves)}
        value = values.get(match[1])
        if value is None:
            return reward

        reward["legal"] = 0.3
        worse = sum(other < value for other in values.values())
        share = 1.0 if value == max(values.values()) else worse / (len(values) - 1)
        reward["best"] = 0.5 * share
        return reward

    def _value(self, board: Any, move: Any) -> float:
        """Return the material of the side to move after the best capture in reply, and mobility."""
        after = board.copy(stack=False)
        after.push(move)
        if after.is_checkmate():
            return 1000.0
        outcomes = [self._material(after, board.turn)]
        for reply in list(after.generate_legal_captures()):
            after.push(reply)
            outcomes.append(self._material(after, board.turn))
            after.pop()
        return float(min(outcomes) - 0.01 * after.legal_moves.count())

    def _material(self, board: Any, side: bool) -> float:
        pieces = board.piece_map().values()
        return float(sum(VALUES[p.piece_type] * (1 if p.color == side else -1) for p in pieces))
