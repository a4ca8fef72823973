"""A model whose two modules share one weight, as GPT-2's do: `tied:Tied`."""

from torch import nn


class Tied(nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocabulary, context, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.output(x)
