"""The style sheet of the HTML page."""

#: Light by default, dark if the reader's system is; text has the contrast of WCAG's level AA.
#: The colours of series are those of Okabe and Ito (2008) for all kinds of colour vision, darkened
#: in light mode and lightened in dark mode.
STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1b222c; --faint: #566170; --line: #d8dde4; --wash: #f5f7f9;
  --good: #0a6b3d; --bad: #b3261e; --grid: #dfe4ea;
  --series-1: #0072b2; --series-2: #c25000; --series-3: #00805c; --series-4: #a33e78;
  --series-5: #8a6d00; --series-6: #3b8fc4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181e; --ink: #e5e9ef; --faint: #a3adba; --line: #37404c; --wash: #1d232c;
    --good: #6fd39c; --bad: #ff9088; --grid: #313945;
    --series-1: #6cb8ee; --series-2: #ff9d5c; --series-3: #4fd0a7; --series-4: #e49ac4;
    --series-5: #e3c24f; --series-6: #a9d6f5; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
header p { margin: .35rem 0 0; color: var(--faint); overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding: 0 0 .4rem; }
th, td { padding: .35rem .4rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--faint); font-weight: 600; border-bottom-width: 2px; }
td small { display: block; color: var(--faint); font-size: .75rem; line-height: 1.2; }
tbody tr:hover { background: var(--wash); }
.prose td:last-child, .prose th:last-child, .points td:first-child, .points th:first-child,
.facts th, .facts td { text-align: left; }
.facts { width: auto; } .facts th { color: var(--faint); font-weight: 400; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
tr.failed td { color: var(--bad); }
.note, figcaption { color: var(--faint); font-size: .875rem; margin: .6rem 0 0; max-width: 48rem; }
.verdict { border-left: 4px solid var(--good); background: var(--wash); padding: .75rem 1rem; }
.verdict p { margin: .2rem 0; } .verdict p:first-child { font-weight: 600; }
.verdict.unmet { border-color: var(--bad); }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 4px;
  padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .8125rem; margin: .5rem 0; }
details { margin: 1.25rem 0; } summary { cursor: pointer; padding: .25rem 0; }
ul { padding-left: 1.25rem; } li { overflow-wrap: anywhere; }
figure { margin: 0 0 1.5rem; }
figure svg { display: block; width: 100%; min-width: 38rem; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; }
@media print { .wide { overflow: visible; } details > * { display: block; } }
"""
