"""Your own loop: look at every round, stop when you like."""

import pdsl

for step in pdsl.rounds(data="digits", graph=pdsl.full(5), rounds=100):
    print(step.t, f"{step.row['accuracy']:.3f}", f"spread of values {step.row['shapley']['spread']:.4f}")
    if step.row["accuracy"] > 0.9:
        break
