class EarlyStopping:
    def __init__(self, patience=11, min_delta=0):
        self.patience = patience
        self.min_delta = min_delta
        self.best_loss = float("inf")
        self.counter = 0

    def __call__(self, val_loss):
        if val_loss < self.best_loss - self.min_delta:
            self.best_loss = val_loss
            self.counter = 0
        else:
            self.counter += 1
        return self.counter >= self.patience


class LRScheduler:
    def __init__(self, warmup_steps: int = 500, total_steps: int = 10000):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.steps = 0

    def step(self, optimizer):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, self.steps / self.warmup_steps)
