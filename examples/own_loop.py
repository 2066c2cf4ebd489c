"""A loop of one's own, recorded by three lines of it: flowledger record -o runs/own -- python examples/own_loop.py

The policy is a table of logits, the reward the share of even tokens; what is told is what any loop could tell.
"""

import torch

import flowledger

B_PROMPT, G, S_RESP, V = 2, 4, 8, 32


def main() -> None:
    torch.manual_seed(0)
    policy = torch.nn.Embedding(B_PROMPT, V)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    prompt = torch.arange(B_PROMPT).repeat_interleave(G)  # [B_prompt*G]
    mask = torch.ones(B_PROMPT * G, S_RESP, dtype=torch.int64)
    with flowledger.recorder(bindings={"B_prompt": B_PROMPT, "G": G, "B": B_PROMPT * G}) as rec:
        for step in range(3):
            sample_id = torch.arange(B_PROMPT * G) + step * B_PROMPT * G
            with rec.stage("rollout", policy_version=step):
                ids = torch.multinomial(policy(prompt).softmax(-1).detach(), S_RESP, replacement=True)
                rec.tensors(sample_id=sample_id, group_id=prompt, response_ids=ids, response_mask=mask)
            with rec.stage("reward"):
                reward = (ids % 2 == 0).float().mean(-1)  # [B_prompt*G]
                rec.tensors(reward=reward)
                rec.metrics(**{"reward/mean": float(reward.mean())})
            with rec.stage("advantage"):
                groups = reward.view(B_PROMPT, G)
                advantage = (groups - groups.mean(-1, keepdim=True)).flatten()
                rec.tensors(advantage=advantage)
            with rec.stage("update_actor"), rec.within("micro_batch"):
                log_prob = policy(prompt).log_softmax(-1).gather(-1, ids)  # [B_prompt*G, S_resp]
                loss = -(log_prob * advantage[:, None]).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.tensors("read", sample_id=sample_id, advantage=advantage)
                rec.tensors(new_log_prob=log_prob, policy_loss=loss)


if __name__ == "__main__":
    main()
