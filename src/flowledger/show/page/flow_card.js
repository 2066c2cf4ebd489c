// A card with the row of what is looked at.

import { fill } from "./dom.js";

// The card stands beside the pointer, or below what has the focus, and always in the window.
export function look(tip, content, element, event) {
  fill(tip, content);
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const [x, y] = event ? [event.clientX + 14, event.clientY + 14] : [Math.max(box.left, 8), Math.min(box.bottom, window.innerHeight) + 6];
  const wide = tip.offsetWidth;
  const high = tip.offsetHeight;
  Object.assign(tip.style, {
    left: `${Math.max(8, Math.min(x, window.innerWidth - wide - 12))}px`,
    top: `${Math.max(8, y + high > window.innerHeight - 8 ? (event ? event.clientY : box.top) - high - 12 : y)}px`,
  });
}
