"""The metrics service: a page, a JSON API and Prometheus gauges over the runs of a folder. Never imports torch.

folder → catalog.py (which runs there are) → views.py (what is read of one, once per change of its files)
→ app.py (routes, who may ask) → browser, scripts, monitoring
"""

from loopscope.service.app import make_app

__all__ = ["make_app"]
