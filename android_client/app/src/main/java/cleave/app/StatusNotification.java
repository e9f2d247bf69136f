package cleave.app;

import android.app.Notification;
import android.app.NotificationChannel;
import android.app.NotificationManager;
import android.app.PendingIntent;
import android.app.Service;
import android.content.Intent;
import android.content.pm.ServiceInfo;
import android.graphics.drawable.Icon;
import android.os.Build;

/** The notification that stands as long as the phone is joined: what it does, pause and stop. */
final class StatusNotification {
    private static final String CHANNEL = "working";
    private static final int ID = 1;
    private static final int ID_OF_END = 2;
    private static final int ANDROID_8 = 26;
    private static final int ANDROID_10 = 29;

    private final Service service;
    private final NotificationManager manager;

    StatusNotification(Service service) {
        this.service = service;
        manager = service.getSystemService(NotificationManager.class);
        if (Build.VERSION.SDK_INT >= ANDROID_8) {
            NotificationChannel channel =
                    new NotificationChannel(
                            CHANNEL,
                            service.getString(R.string.channel),
                            NotificationManager.IMPORTANCE_LOW);
            channel.setDescription(service.getString(R.string.channel_about));
            channel.setShowBadge(false);
            manager.createNotificationChannel(channel);
        }
    }

    /** Show it, and so be allowed to work while the app is not in front. */
    void begin(String text) {
        Notification shown = make(text, false);
        if (Build.VERSION.SDK_INT >= ANDROID_10) {
            service.startForeground(ID, shown, ServiceInfo.FOREGROUND_SERVICE_TYPE_DATA_SYNC);
        } else {
            service.startForeground(ID, shown);
        }
    }

    void update(String text, boolean pausedByOwner) {
        manager.notify(ID, make(text, pausedByOwner));
    }

    /** Why it stopped, once it is not joined any more. */
    void tell(String text) {
        manager.notify(ID_OF_END, plain(text).setAutoCancel(true).build());
    }

    private Notification make(String text, boolean pausedByOwner) {
        Notification.Action toggle =
                pausedByOwner
                        ? action(R.string.resume, DeviceService.RESUME)
                        : action(R.string.pause, DeviceService.PAUSE);
        return plain(text)
                .setOngoing(true)
                .addAction(toggle)
                .addAction(action(R.string.stop, DeviceService.STOP))
                .build();
    }

    private Notification.Builder plain(String text) {
        Intent open = new Intent(service, MainActivity.class);
        PendingIntent opens =
                PendingIntent.getActivity(service, 0, open, PendingIntent.FLAG_IMMUTABLE);
        return builder()
                .setSmallIcon(R.drawable.tiles)
                .setContentTitle(service.getString(R.string.app_name))
                .setContentText(text)
                .setStyle(new Notification.BigTextStyle().bigText(text))
                .setContentIntent(opens)
                .setOnlyAlertOnce(true)
                .setShowWhen(false)
                .setVisibility(Notification.VISIBILITY_PUBLIC);
    }

    @SuppressWarnings("deprecation") // the builder without channel, for Android 7
    private Notification.Builder builder() {
        return Build.VERSION.SDK_INT >= ANDROID_8
                ? new Notification.Builder(service, CHANNEL)
                : new Notification.Builder(service);
    }

    private Notification.Action action(int label, String what) {
        Intent intent = new Intent(service, DeviceService.class).setAction(what);
        PendingIntent pending =
                PendingIntent.getService(service, 0, intent, PendingIntent.FLAG_IMMUTABLE);
        Icon icon = Icon.createWithResource(service, R.drawable.tiles);
        return new Notification.Action.Builder(icon, service.getString(label), pending).build();
    }
}
