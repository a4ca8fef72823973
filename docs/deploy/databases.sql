-- A second database: Optuna cannot share MLflow's.
CREATE DATABASE optuna;
