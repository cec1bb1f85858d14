"""How the HTML page looks."""

#: Light by default, dark where the reader's system is. Contrasts are those of WCAG AA or better.
STYLE = """
:root { --paper: #fff; --ink: #1c2330; --faint: #59636e; --line: #d5dae1; --wash: #f4f6f8;
  --good: #0a6b3d; --bad: #b3261e; --grid: #e3e7ec; }
@media (prefers-color-scheme: dark) {
:root { --paper: #14181f; --ink: #e4e8ee; --faint: #a0aab6; --line: #343c48; --wash: #1c222b;
  --good: #6bd19b; --bad: #ff8a80; --grid: #2a313b; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
"""
