-- Beside MLflow's own: Optuna cannot share one with it.
CREATE DATABASE optuna;
