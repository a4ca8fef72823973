"""Train pytorch-tabnet's classifier on scikit-learn's handwritten digits, as a Python function.

    sweep run experiments/studies/programs/tabnet.toml

As in its README.
"""

from pytorch_tabnet.tab_model import TabNetClassifier
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

X, y = load_digits(return_X_y=True)
X_train, X_valid, y_train, y_valid = train_test_split(X / 16, y, train_size=1280, random_state=0)


def train(trial):
    clf = TabNetClassifier(seed=trial.seed, optimizer_params={"lr": trial.learning_rate}, verbose=0)
    clf.fit(
        X_train,
        y_train,
        eval_set=[(X_valid, y_valid)],
        eval_metric=["logloss"],
        max_epochs=trial.epochs,
        patience=0,
        batch_size=trial.batch_size,
        virtual_batch_size=16,
    )
    trial.log({"valid/loss": clf.history["val_0_logloss"][-1]}, step=trial.steps)
