package cleave.app;

import android.app.Activity;
import android.app.AlertDialog;
import android.content.DialogInterface;
import cleave.core.JoinLink;

/**
 * Asks the owner before the phone joins: which server, and how it is known to be that one. One at a
 * time: a link that comes while another is asked for is dropped, so that nothing changes under the
 * finger that says yes.
 */
final class ConsentDialog {
    private static final int DIGITS_IN_A_GROUP = 4;
    private static final String SHA256 = "sha256:";

    private final Activity activity;
    private AlertDialog shown; // the latest; null: none

    ConsentDialog(Activity activity) {
        this.activity = activity;
    }

    void ask(JoinLink link, Runnable agreed) {
        if (shown != null && shown.isShowing()) {
            return;
        }
        shown =
                new AlertDialog.Builder(activity)
                        .setTitle(activity.getString(R.string.consent_title, link.host))
                        .setMessage(text(link))
                        .setPositiveButton(R.string.yes, (dialog, which) -> agreed.run())
                        .setNegativeButton(R.string.no, null)
                        .show();
        // Another app's window over it may show other words.
        shown.getButton(DialogInterface.BUTTON_POSITIVE).setFilterTouchesWhenObscured(true);
    }

    /** Without an answer, as its activity goes. */
    void dismiss() {
        if (shown != null) {
            shown.dismiss();
        }
    }

    private String text(JoinLink link) {
        String body = activity.getString(R.string.consent_body, link.origin());
        return body + "\n\n" + identity(link);
    }

    private String identity(JoinLink link) {
        if (!link.isSecure) {
            return activity.getString(R.string.consent_plain);
        }
        return link.fingerprint.isEmpty()
                ? activity.getString(R.string.consent_verified)
                : activity.getString(R.string.consent_pinned, grouped(link.fingerprint));
    }

    /** The digits in groups, to be compared by eye. */
    private static String grouped(String fingerprint) {
        String digits = fingerprint.substring(SHA256.length());
        StringBuilder groups = new StringBuilder(SHA256);
        for (int at = 0; at < digits.length(); at += DIGITS_IN_A_GROUP) {
            groups.append(' ').append(digits, at, at + DIGITS_IN_A_GROUP);
        }
        return groups.toString();
    }
}
